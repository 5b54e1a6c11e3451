"""Specs that are wrong in themselves or of their model are told so early, and the old bundle stays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests import builders as models
from tests.prepare.builders import SHAPES, Project, folding_net, untouched

USUAL = "name: net\nsource: {path: ../models/net.onnx}\n"

# One case of each place that refuses: what each place refuses is in the tests of specs and of agreement.
WRONG: dict[str, tuple[str | bytes, str]] = {
    "a misspelt key": (
        USUAL + "verifi: {rtol: 1}\n",
        r"net\.yaml:3: verifi: unknown key; did you mean 'verify'\?",
    ),
    "no UTF-8": (USUAL.encode() + b"# caf\xe9\n", r"UTF-8"),
    "no YAML": (USUAL + "verify: {rtol: 1\n", r"net\.yaml"),
    "nothing": (b"", r"net\.yaml"),
    "an option ONNX Runtime does not know": (
        USUAL + "runtime: {session_config: {session.use_env_allocator: 1}}\n",
        r"net\.yaml:3: runtime\.session_config\.'session\.use_env_allocator': .*session\.use_env_allocators",
    ),
    "an unknown demo": ("name: net\nsource: {demo: resnet5000}\n", r"resnet5000"),
}


@pytest.mark.parametrize(("text", "pattern"), WRONG.values(), ids=WRONG)
def test_a_wrong_spec_is_told_with_its_line_and_the_old_bundle_stays(
    built: Project, text: str | bytes, pattern: str
) -> None:
    (built.configs / "net.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with untouched(built):
        outcome = built.call("prepare")
    assert outcome.out == ""
    assert re.search(pattern, outcome.err), outcome.err
    assert "Traceback" not in outcome.err
    assert (outcome.code, outcome.err.startswith(("error: ", "FAILED fetch:net\nerror: "))) in {
        (2, True),
        (1, True),
    }


def test_doit_tells_a_wrong_spec_as_the_command_does(built: Project) -> None:
    built.write_spec(verifi={})
    outcome = built.doit("prepare")
    assert outcome.code != 0
    assert "verifi: unknown key; did you mean 'verify'?" in outcome.err
    assert "Traceback" not in outcome.err


Sections = dict[str, Any]

CONTRADICTING: dict[str, tuple[Callable[[], onnx.ModelProto], Sections, str]] = {
    "a shape that is missing": (folding_net, {"inputs": {}}, r"inputs\.x\.shapes: missing"),
    "sizes that contradict each other": (
        models.two_inputs,
        {"inputs": {"left": {"shapes": [[1, 4]]}, "right": {"shapes": [[2, 4]]}}},
        r"expected one size of 'batch' in shapes\[0\], got 1 in left, 2 in right",
    ),
    "strings without values": (
        models.string_input,
        {"inputs": {"words": {"shapes": [[3]]}}},
        r"inputs\.words",
    ),
    "a sequence": (models.sequence_input, {}, r"items.*sequence"),
    "samples that are not there": (folding_net, {"inputs": SHAPES, "samples": "none/*.npz"}, r"none/\*\.npz"),
}


@pytest.mark.parametrize(("model", "sections", "pattern"), CONTRADICTING.values(), ids=CONTRADICTING)
def test_a_spec_that_contradicts_its_model_is_refused_before_long_work(
    built: Project, model: Callable[[], onnx.ModelProto], sections: Sections, pattern: str
) -> None:
    built.add(model(), **sections)
    with untouched(built):
        outcome = built.call("prepare")
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search(pattern, outcome.err), outcome.err
    assert "fetch of net: spec does not fit its model: net, configs/net.yaml\n" in outcome.err
    assert (
        "\nhint: correct the entries named above in configs/net.yaml, then ortprep prepare net\n"
        in outcome.err
    )
    assert "done" not in outcome.err.replace("0 done", "")


@pytest.mark.parametrize(
    ("arrays", "pattern"),
    [
        ({"x": np.zeros((1, 64), np.float64)}, r"float64"),
        ({"x": np.array([None])}, r"pickle|object"),
    ],
    ids=["dtype", "objects"],
)
def test_samples_that_do_not_fit_are_refused_by_file(
    built: Project, arrays: dict[str, np.ndarray[Any, Any]], pattern: str
) -> None:
    np.savez(built.configs / "one.npz", **arrays)  # type: ignore[arg-type]
    built.write_spec(inputs=SHAPES, samples="*.npz")
    with untouched(built):
        outcome = built.call("prepare")
    assert outcome.code == 2, outcome.err
    assert "one.npz" in outcome.err
    assert re.search(pattern, outcome.err)


def random_net() -> onnx.ModelProto:
    """`x` [batch, 4] → `y`, which is other at every run."""
    nodes = [
        onnx.helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        onnx.helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    return models.build_model(
        nodes,
        inputs=[models.value("x", kind, ["batch", 4])],
        outputs=[models.value("y", kind, ["batch", 4])],
    )


@pytest.mark.slow
def test_a_model_that_answers_at_random_fails_the_build_with_the_worst_element(built: Project) -> None:
    built.add(random_net(), inputs={"x": {"shapes": [[2, 4]]}})
    with untouched(built):
        outcome = built.call("prepare")
    assert outcome.code == 1
    assert "error: verify/cpu of net: " in outcome.err
    assert re.search(r"y\[\d+, \d+\]|y.*\[\d, ?\d\]", outcome.err), outcome.err
    assert "not tried" in outcome.err


@pytest.mark.slow
def test_a_tolerance_below_what_optimising_changes_fails_with_the_worst_element_and_an_honest_one(
    built: Project,
) -> None:
    built.write_spec(inputs=SHAPES, verify={"rtol": 1e-9, "atol": 1e-9})
    with untouched(built):
        outcome = built.call("prepare")
    assert outcome.code == 1
    assert "error: verify/cpu of net: " in outcome.err
    assert re.search(r"\n  expected [-\d.e]+ at \[0, \d+\], got [-\d.e]+ \(rtol 1e-09", outcome.err), (
        outcome.err
    )
    assert re.search(r"\nhint: .*set verify: \{rtol: [\d.e-]+, atol: ", outcome.err)


def test_problems_of_several_specs_are_told_at_once(built: Project) -> None:
    built.write_spec("one", verifi={})
    built.write_spec("two", sorce={})
    outcome = built.call("prepare")
    assert outcome.code == 2
    assert "one.yaml:1: verifi" in outcome.err
    assert "two.yaml:1: sorce" in outcome.err


def test_defaults_fill_what_specs_leave_out_and_are_part_of_what_was_built(built: Project) -> None:
    (built.configs / "defaults.yaml").write_text(json.dumps({"verify": {"rtol": 0.5}}))
    assert any(line.startswith("verify.rtol: ") for line in built.explain()["verify/cpu"])


def test_the_spec_is_read_before_anything_is_written(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    project.write_spec(verifi={})
    assert project.call("prepare").code == 2
    assert not project.artifacts.exists()
