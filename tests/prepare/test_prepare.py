"""From a spec to `load`; a second run does nothing; a third does what changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from bench.big_model import prepare_big_model
from ortprep.bundle.codec import read_json
from ortprep.bundle.digest import digest_file
from ortprep.bundle.file_links import link_or_copy
from ortprep.bundle.loader_config import find_variant, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.runtime import load
from ortprep.stages.package import prepared_variants
from tests import builders as models
from tests.builders import write_external_model, write_model
from tests.prepare.builders import (
    AS_PREPARED,
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
    built.call("explain")  # the copy's digests are now known
    before = stamps(built.artifacts)
    outcome = built.call("prepare")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "0 done, 7 up to date\n")
    assert stamps(built.artifacts) == before
    assert built.explain() == {}


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

    assert done(built.call("prepare")) == all_tasks()
    feeds = {"x": np.ones((1, 64), np.float32)}
    expected = source_answers(built.models / "net.onnx", feeds)["y"]
    session = load(built.bundle())
    assert session.get_session_options().intra_op_num_threads == 1
    np.testing.assert_allclose(answers(session, feeds)["y"], expected, rtol=1e-3, atol=1e-5)
    assert not set(old.values()) & set(stamps(built.bundle()).values())


def test_a_model_that_was_only_touched_is_not_built_again(built):
    write_model(folding_net(), built.models / "net.onnx")
    assert built.explain() == {}
    assert done(built.call("prepare")) == set()


@pytest.mark.slow
def test_a_digest_pinned_later_is_compared_and_costs_nothing_else(built):
    model = built.models / "net.onnx"
    built.write_spec(inputs=SHAPES, source={"path": "../models/net.onnx", "sha256": digest_file(model)})
    assert built.explain()["fetch"] == [f"sha256: was None, is {digest_file(model)[:57]}…"]
    assert done(built.call("prepare")) == {"fetch:net", "package:net"}


@pytest.mark.slow
def test_a_damaged_bundle_is_put_together_again_without_other_work(built):
    name = preferred_model(built.bundle())
    (built.bundle() / name).unlink()
    (built.bundle() / "stray").write_text("?")
    assert {reason.partition(":")[0] for reason in built.explain()["package"]} == {name, "stray"}
    assert done(built.call("prepare")) == {"package:net"}
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


# -- models of every kind, and one that is larger than memory

# -- a model larger than most machines want to hold twice: 2.5 GiB of weights in external data


@pytest.mark.manual
def test_a_model_of_2_5_gib_is_prepared_and_loaded_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    figures = prepare_big_model(tmp_path, size_bytes=int(2.5 * 2**30))
    assert figures["weights_gib"] == 2.5
    assert figures["parent_peak_mib"] < 300
    assert figures["children_peak_over_model"] < 2.2
    assert figures["load_peak_over_model"] < 2.2


# -- every shape of model that the build has to cope with, through whole builds


Inputs = dict[str, dict[str, Any]]

X4: Inputs = {"x": {"shapes": [[2, 4]]}}
X4096: Inputs = {"x": {"shapes": [[2, 4096]]}}
X8: Inputs = {"x": {"shapes": [[2, 8]]}}
IDS: Inputs = {name: {"shapes": [[2, 3]]} for name in ("ids", "mask")}
WORDS: Inputs = {"words": {"shapes": [[3]], "values": ["low", "high", "naïve"]}}

KINDS: dict[str, tuple[Callable[[], onnx.ModelProto], Inputs]] = {
    "zero-inputs": (models.zero_inputs, {}),
    "strings": (models.string_input, WORDS),
    "if": (models.if_net, X4),
    "branches": (lambda: models.if_net(size=4096), X4096),  # with external data of their own
    "loop": (models.loop_net, {}),
    "float16": (models.half_net, X8),
    "bfloat16": (models.bfloat16_net, {}),
    "int8": (models.int8_net, X8),
    "index": (models.embedding, IDS),
    "function": (models.function_net, X4),
}


TOLERANCES = {"int8": {"rtol": 0.05, "atol": 0.05}}
"""ONNX Runtime's optimiser rounds what an int8 MatMul is fed, in every load, prepared or not."""

EXACT = ("zero-inputs", "strings", "branches")
"""Those that answer to the bit as their source does."""


UNUSUAL = ("branches",)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A project with a model of every kind, none of it built."""
    project = Project(tmp_path_factory.mktemp("zoo") / "project")
    for name, (build, inputs) in KINDS.items():
        project.add(build(), name, inputs=inputs, verify=TOLERANCES.get(name, {}), tune=AS_PREPARED)
    return project


def feeds_of(folder):
    """Returns the feeds of the golden sample in a folder."""
    with np.load(folder / "golden.npz", allow_pickle=False) as golden:
        return {key.removeprefix("input:"): golden[key] for key in golden.files if key.startswith("input:")}


@pytest.mark.slow
def test_every_kind_is_optimised_and_answers_as_before(zoo):
    outcome = zoo.doit("-n", "2", "verify")
    expected = {
        task for name in KINDS for task in all_tasks(name) if not task.startswith(("measure", "package"))
    }
    assert done(outcome) == expected
    for name in KINDS:
        receipt = read_json(zoo.work(name) / "receipts" / "optimize-cpu.json")
        assert receipt["result"]["step"] == "all"  # nothing had to be left out
        # An empty data file is never left.
        assert all(path.stat().st_size for path in (zoo.work(name) / "optimize-cpu").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in UNUSUAL else pytest.mark.manual) for name in KINDS]
)
def test_a_bundle_of_every_kind_loads_and_passes_its_golden_sample(zoo, name):
    assert zoo.run("prepare", name).code == 0
    assert zoo.run("check", str(zoo.bundle(name))).code == 0
    assert load(zoo.bundle(name), check="golden", digests="full")
    assert load(zoo.bundle(name), check="golden", target="portable")
    if name in EXACT:
        feeds = feeds_of(zoo.bundle(name))
        got = answers(load(zoo.bundle(name)), feeds)
        for output, values in source_answers(zoo.models / f"{name}.onnx", feeds).items():
            assert np.array_equal(got[output], values)


@pytest.mark.slow
def test_real_inputs_are_what_is_verified_and_a_drawn_one_is_kept(tmp_path):
    project = Project(tmp_path / "project")
    project.write_spec(samples="samples/*.npz", inputs={"x": {"shapes": [[3, 64]]}})
    write_external_model(models.matmul_net(), project.models / "net.onnx", location="deep/er/weights.bin")
    (project.configs / "samples").mkdir()
    real = np.full((3, 64), 0.25, np.float32)
    np.savez(project.configs / "samples" / "one.npz", x=real)
    assert project.doit("verify").code == 0
    record = read_json(project.work() / "receipts" / "verify-cpu.json")["result"]["record"]
    assert (record["inputs"], record["samples"]) == ("samples", 1)
    kept = feeds_of(project.work() / "verify-cpu")["x"]
    assert kept.shape == real.shape
    assert not np.array_equal(kept, real)


@pytest.mark.slow
def test_a_bundle_that_does_not_load_is_never_published(zoo, monkeypatch):
    def link(model, destination):
        for path in model.parent.iterdir():
            link_or_copy(path, destination.parent / path.name)

    zoo.add(models.if_net(size=4096), "linked", inputs=X4096, tune=AS_PREPARED)
    monkeypatch.setattr(prepared_variants, "share_model", link)
    outcome = zoo.call("prepare", "linked")
    assert outcome.code == 1
    assert "package of linked: the bundle cannot be used" in outcome.err
    assert "hard link" in outcome.err
    assert not zoo.bundle("linked").exists()
