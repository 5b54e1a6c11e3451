"""From a spec with a search to a bundle, the search killed on the way, and every form a bundle can have."""

import json
from unittest.mock import patch

import numpy as np
import pytest
from onnx import TensorProto, helper

from ortprep.bundle.codec import encode
from ortprep.bundle.manifest import read_manifest
from ortprep.children.probe import ProbeResult
from ortprep.runtime import load, wait_steady
from tests.builders import build_model, tensor, value
from tests.prepare.builders import (
    Project,
    answers,
    done,
    is_intact,
    preferred_model,
    source_answers,
)

pytestmark = pytest.mark.manual

SHAPES = {"image": {"shapes": [[1, 3, 16, 16], [2, 3, 16, 16]]}}
TUNE = {"max_trials": 6, "budget_s": 900, "rounds": 3, "steady_s": 0.01}
FEEDS = {"image": np.random.default_rng(3).random((2, 3, 16, 16), np.float32)}


def convolution_net(*, seed=0):
    """`image` [batch, 3, 16, 16] → convolution, pooling, matrix product → `y` [batch, 300]."""
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("Conv", ["image", "kernel", "bias"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("GlobalAveragePool", ["relu"], ["pool"]),
        helper.make_node("Flatten", ["pool"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    weights = [
        tensor("kernel", rng.normal(0, 0.3, (32, 3, 3, 3)).astype(np.float32)),
        tensor("bias", rng.normal(0, 0.1, 32).astype(np.float32)),
        tensor("w", rng.normal(0, 1, (32, 300)).astype(np.float32)),
    ]
    return build_model(
        nodes,
        inputs=[value("image", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", 300])],
        initializers=weights,
    )


def write_spec(project, *, runtime=None, **tune):
    project.write_spec(inputs=SHAPES, tune={**TUNE, **tune}, runtime=runtime or {})


def variant(project):
    return read_manifest(project.bundle()).variants[0]


def tuning(project):
    record = variant(project).tuning
    assert record is not None
    return record


def assert_answers_as_the_source(project):
    expected = source_answers(project.models / "net.onnx", FEEDS)["y"]
    got = answers(load(project.bundle(), check="golden", digests="full"), FEEDS)["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A project whose first build searched. Not to be changed."""
    project = Project(tmp_path_factory.mktemp("tuned") / "project")
    project.add(convolution_net(), inputs=SHAPES, tune=TUNE)
    outcome = project.run("prepare")
    assert {"tune:net/cpu", "measure:net/cpu", "package:net"} <= done(outcome)
    return project


@pytest.fixture
def tuned(searched, tmp_path):
    """A searched project of the test's own."""
    return searched.copy_to(tmp_path / "project")


def test_a_search_ends_with_a_whole_bundle_and_nothing_beside_it(searched):
    assert searched.run("check", "artifacts/net").code == 0
    assert is_intact(searched.bundle())
    assert searched.leftovers() == []


def test_the_manifest_has_every_trial_with_its_options_and_figures_or_its_failure(searched):
    record = tuning(searched)
    assert [trial.number for trial in record.trials] == list(range(len(record.trials)))
    assert 3 <= len(record.trials) <= 6
    assert [trial.kind for trial in record.trials][:4] == ["default", "base", "form", "form"]
    for trial in record.trials:
        assert (trial.figures is None) == (trial.failure is not None)
        assert trial.session_options is not None
        assert [provider.name for provider in trial.providers] == ["CPUExecutionProvider"]
        if trial.figures is not None:
            assert trial.figures.init_ms.minimum > 0
            assert trial.figures.cost_ratio is not None
            assert trial.figures.cost_ratio.count == trial.figures.steady_ms.count in (1, 2)
    chosen = record.trials[record.chosen]
    assert chosen.choice.keys() == record.knobs.keys()
    assert chosen.final is not None
    assert chosen.final.init_ms.count == 3
    assert record.ended.startswith("max_trials, 6, is used up")
    assert record.elapsed_s > 0


def fake_measure(request, **_):
    """Stands for `measure_plan`: what is prepared less loads sooner and runs longer, the source apart."""
    assert request.plan is not None
    options = request.plan.session_options
    is_source = options.graph_optimization_level == "ORT_ENABLE_ALL"
    init_ms, steady_ms = (1000.0 if is_source else 100.0), 1.0
    if options.config_entries.get("session.disable_prepacking") == "1":
        init_ms, steady_ms = 0.5 * init_ms, 2 * steady_ms
        if "/inline-" in request.plan.model:
            init_ms = 1.6 * init_ms
    return ProbeResult(
        ready_ms=init_ms + 42.0,
        import_ms=50.0,
        init_ms=init_ms,
        first_ms=2.0,
        steady_ms=steady_ms,
        runs=5,
        private_mb=50.0,
        peak_mb=100.0,
        gpu_mb=None,
        onnxruntime="1.31.1",
        more_steady_ms=(steady_ms,) * len(request.more_samples),
    )


def prepare_with_given_figures(project, *, runtime=None, **tune):
    """Runs `ortprep prepare` with all but the measuring real."""
    write_spec(project, runtime=runtime, **tune)
    with (
        patch("ortprep.tuning.trial.measure_plan", fake_measure),
        patch("ortprep.stages.measure.stage.measure_plan", fake_measure),
    ):
        return project.call("prepare")


@pytest.fixture(scope="module")
def verified(searched, tmp_path_factory):
    """A searched project whose search the tests here do again and again, each with its own restrictions."""
    return searched.copy_to(tmp_path_factory.mktemp("forms") / "project")


FORMS = {
    ("mapped", "extended"): {"net_optimized.onnx", "net_optimized.onnx.data"},
    ("inline", "all-reduced"): {"net_optimized.onnx"},
    ("prepacked", "all"): {"net_optimized.onnx", "net_optimized.onnx.data"},
    ("ort", "extended"): {"net_optimized.ort"},
}


@pytest.mark.parametrize(("form", "level"), FORMS)
def test_every_form_and_level_makes_a_bundle_that_loads_and_answers_right(verified, form, level):
    outcome = prepare_with_given_figures(verified, max_trials=2, space={"form": [form], "level": [level]})
    assert outcome.code == 0, outcome.err
    record = tuning(verified)
    chosen = record.trials[record.chosen]
    assert chosen.kind == "base"
    assert (chosen.choice["form"], chosen.choice["level"]) == (form, level)
    assert (record.knobs["form"], record.knobs["level"]) == ((form,), (level,))
    decision = variant(verified).decision
    assert decision is not None
    assert decision.shipped == "prepared"
    model = verified.bundle() / preferred_model(verified.bundle())
    assert {path.name for path in model.parent.iterdir()} == FORMS[form, level]
    assert_answers_as_the_source(verified)


def test_two_phases_share_the_files_of_the_second_one_where_they_can(tuned):
    space = {"form": ["prepacked", "mapped"], "level": ["all"], "threads": ["all"], "spinning": ["on"]}
    assert prepare_with_given_figures(tuned, space=space).code == 0
    record = tuning(tuned)
    assert record.first_phase is not None
    config = json.loads((tuned.bundle() / "loader.json").read_text())["variants"][0]
    assert config["first_phase"]["session_options"] == encode(
        record.trials[record.first_phase.trial].session_options
    )
    assert config["first_phase"]["session_options"]["config_entries"]["session.disable_prepacking"] == "1"
    assert {path.name for path in (tuned.bundle() / "cpu").iterdir()} == FORMS["prepacked", "all"]
    assert tuned.run("check", "artifacts/net").code == 0
    session = load(tuned.bundle(), check="golden")
    early = answers(session, FEEDS)["y"]
    wait_steady(session, 600)
    expected = source_answers(tuned.models / "net.onnx", FEEDS)["y"]
    for got in (early, answers(session, FEEDS)["y"]):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


def test_plans_for_forks_are_searched_on_one_thread_and_compared_as_forks(tuned):
    write_spec(tuned, fork=True, space={"form": ["mapped", "prepacked"], "level": ["all"]})
    outcome = tuned.run("prepare")
    assert done(outcome) == {"tune:net/cpu", "measure:net/cpu", "package:net"}
    record, decision = tuning(tuned), variant(tuned).decision
    assert not {"threads", "spinning", "execution"} & record.knobs.keys()
    assert record.first_phase is None
    assert record.reason.startswith("as forked workers: ")
    for trial in record.trials:
        assert trial.figures is not None, trial.failure
        assert trial.figures.ready_ms.median < 100  # no interpreter, no import
    assert decision is not None
    assert decision.reason.startswith("as forked workers, on one thread: ")
    assert_answers_as_the_source(tuned)


def test_without_trials_the_plan_that_space_names_is_prepared_and_held_against_the_default(verified):
    space = {"form": ["inline", "mapped"], "memory_arena": ["off"]}
    outcome = prepare_with_given_figures(verified, max_trials=0, space=space)
    assert done(outcome) == {"tune:net/cpu", "measure:net/cpu", "package:net"}
    record = tuning(verified)
    assert {trial.kind for trial in record.trials} == {"default", "base"}
    chosen = record.trials[record.chosen].choice
    assert (chosen["form"], chosen["memory_arena"]) == ("inline", "off")
    config = json.loads((verified.bundle() / "loader.json").read_text())["variants"][0]
    assert config["session_options"]["attributes"] == {"enable_cpu_mem_arena": False}
    assert_answers_as_the_source(verified)


def test_options_of_the_spec_reach_every_session_and_are_not_searched(tuned):
    runtime = {"enable_cpu_mem_arena": False, "execution_mode": "ORT_SEQUENTIAL", "log_severity_level": 3}
    outcome = prepare_with_given_figures(tuned, runtime=runtime, max_trials=0, space={"form": ["mapped"]})
    assert outcome.code == 0, outcome.err
    record = tuning(tuned)
    assert not {"memory_arena", "execution"} & record.knobs.keys()
    for variant in json.loads((tuned.bundle() / "loader.json").read_text())["variants"]:
        assert variant["session_options"]["attributes"] == runtime
    assert_answers_as_the_source(tuned)
