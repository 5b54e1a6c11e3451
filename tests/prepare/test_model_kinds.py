"""Models of every kind, and one that is larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from bench.big_model import prepare_big_model
from ortprep.bundle.codec import read_json
from ortprep.bundle.file_links import link_or_copy
from ortprep.runtime import load
from ortprep.stages.package import prepared_variants
from tests import builders as models
from tests.builders import write_external_model
from tests.prepare.builders import AS_PREPARED, Project, all_tasks, answers, done, source_answers

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
