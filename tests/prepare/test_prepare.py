"""From a spec to `load`; a second run does nothing; a third does what changed."""

import numpy as np
import pytest

from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import find_variant, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.runtime import load
from tests.builders import write_external_model, write_model
from tests.prepare.builders import (
    QUICK,
    SHAPES,
    Outcome,
    Project,
    all_tasks,
    answers,
    done,
    folding_net,
    is_intact,
    preferred_model,
    source_answers,
    stamps,
)

Built = tuple[Project, Outcome]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_loaded_bundle_answers_as_the_source_does(first_build, batch):
    project, _ = first_build
    feeds = {"x": np.random.default_rng(7).random((batch, 64), np.float32)}
    expected = source_answers(project.models / "net.onnx", feeds)
    got = answers(load(project.bundle(), check="golden", digests="full"), feeds)
    assert list(got) == list(expected)
    np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-3, atol=1e-5)


def test_the_fallback_is_optimised_at_every_load_and_its_record_says_beside_what_it_was_measured(first_build):
    project, _ = first_build
    feeds = {"x": np.random.default_rng(7).random((3, 64), np.float32)}
    session = load(project.bundle(), target="portable", check="golden")
    assert session.get_session_options().graph_optimization_level.name == "ORT_ENABLE_ALL"
    expected = source_answers(project.models / "net.onnx", feeds)["y"]
    np.testing.assert_allclose(answers(session, feeds)["y"], expected, rtol=1e-3, atol=1e-5)

    record = next(one for one in read_manifest(project.bundle()).variants if one.name == "portable")
    assert {figures.plan for figures in record.measurements[0].plans} == {"default", "portable"}
    assert record.decision is not None
    variant = find_variant(read_loader_config(project.bundle()), "portable")
    assert variant is not None
    source = variant.model == "portable/net.onnx"
    assert record.decision.shipped == ("default" if source else "portable")


def test_the_first_build_does_every_task_and_leaves_no_unfinished_work(first_build):
    project, outcome = first_build
    assert done(outcome) == all_tasks()
    assert outcome.err.endswith("7 done, 0 up to date\n")
    assert outcome.out == ""
    assert is_intact(project.bundle())
    assert project.leftovers() == []


def test_a_second_run_writes_nothing(built):
    built.run("explain")  # the copy's digests are now known
    before = stamps(built.artifacts)
    outcome = built.run("prepare")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "0 done, 7 up to date\n")
    assert stamps(built.artifacts) == before
    assert built.explain() == {}


@pytest.mark.slow
def test_longer_measurements_measure_again_and_do_nothing_else(built):
    built.write_spec(inputs=SHAPES, measure={**QUICK, "steady_s": 0.02})
    reasons = built.explain()
    assert set(reasons) == {"measure/cpu", "package"}
    assert reasons["measure/cpu"] == ["measure.steady_s: was 0.01, is 0.02"]
    assert "measure/cpu runs before it" in reasons["package"]

    kept = stamps(built.work() / "optimize-cpu")
    assert done(built.run("prepare")) == {"measure:net/cpu", "package:net"}
    assert stamps(built.work() / "optimize-cpu") == kept


@pytest.mark.slow
def test_another_tolerance_verifies_again_and_optimises_nothing(built):
    built.write_spec(inputs=SHAPES, verify={"rtol": 0.01})
    reasons = built.explain()
    assert [line for line in reasons["verify/cpu"] if "rtol" in line] == ["verify.rtol: was 0.001, is 0.01"]
    assert not {"fetch", "optimize/cpu", "optimize/portable"} & set(reasons)
    assert done(built.doit("verify")) == {"verify:net/cpu", "verify:net/portable"}


@pytest.mark.slow
def test_a_replaced_model_and_an_option_for_jobs_reach_their_sessions(built):
    old = stamps(built.bundle())
    built.write_spec(inputs=SHAPES, runtime={"intra_op_num_threads": 1})
    reasons = built.explain()
    assert reasons["optimize/cpu"] == ["runtime.intra_op_num_threads: was None, is 1"]
    assert "fetch" not in reasons
    write_model(folding_net(seed=1), built.models / "net.onnx")
    reasons = built.explain()
    assert [line.partition(":")[0] for line in reasons["fetch"]] == ["source.digest"]
    assert set(reasons) == {task.replace(":net", "") for task in all_tasks()}

    assert done(built.run("prepare")) == all_tasks()
    feeds = {"x": np.ones((1, 64), np.float32)}
    expected = source_answers(built.models / "net.onnx", feeds)["y"]
    session = load(built.bundle())
    assert session.get_session_options().intra_op_num_threads == 1
    np.testing.assert_allclose(answers(session, feeds)["y"], expected, rtol=1e-3, atol=1e-5)
    assert not set(old.values()) & set(stamps(built.bundle()).values())


def test_a_model_that_was_only_touched_is_not_built_again(built):
    write_model(folding_net(), built.models / "net.onnx")
    assert built.explain() == {}
    assert done(built.run("prepare")) == set()


@pytest.mark.slow
def test_a_digest_pinned_later_is_compared_and_costs_nothing_else(built):
    model = built.models / "net.onnx"
    built.write_spec(inputs=SHAPES, source={"path": "../models/net.onnx", "sha256": digest_file(model)})
    assert built.explain()["fetch"] == [f"sha256: was None, is {digest_file(model)[:57]}…"]
    assert done(built.run("prepare")) == {"fetch:net", "package:net"}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_damaged_bundle_is_put_together_again_without_other_work(built, damage):
    model = built.bundle() / preferred_model(built.bundle())
    whole = model.read_bytes()
    if damage == "changed":
        model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "missing":
        model.unlink()
    else:
        (built.bundle() / "stray").write_text("?")
    name = "stray" if damage == "added" else preferred_model(built.bundle())
    (reason,) = built.explain()["package"]
    assert reason.startswith(f"{name}: ")
    assert done(built.run("prepare")) == {"package:net"}
    assert is_intact(built.bundle())


@pytest.mark.slow
def test_external_weights_count_as_part_of_the_model(tmp_path):
    project = Project(tmp_path / "project")
    project.write_spec(inputs=SHAPES)
    write_external_model(folding_net(), project.models / "net.onnx")
    assert project.doit("fetch:net").code == 0
    assert "fetch" not in project.explain()

    weights = project.models / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (reason,) = project.explain()["fetch"]
    assert reason.startswith("source.external.weights.bin: was sha256:")


def test_the_order_of_a_specs_lines_and_its_comments_change_nothing(built):
    path = built.configs / "net.yaml"
    path.write_text(f"# a comment\n{path.read_text()}\n")
    assert built.explain() == {}


def test_a_spec_taken_away_leaves_its_bundle(built):
    (built.configs / "net.yaml").rename(built.root / "net.yaml")
    built.add(folding_net(), "other", inputs=SHAPES)
    assert done(built.doit("fetch")) == {"fetch:other"}
    assert is_intact(built.bundle())
