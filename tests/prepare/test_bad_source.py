"""Models that cannot be prepared: each is refused by name, and the old bundle stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests import builders as models
from tests.builders import write_external_model, write_model
from tests.prepare.builders import SHAPES, Project, folding_net, is_intact, untouched

pytestmark = pytest.mark.slow

Change = Callable[[Project], object]

FORM = re.compile(
    r"error: (?P<what>.+)\n(?P<details>(  .+\n)*)(\nhint: .+\n)?(.+\n)*?[01] done, .*[12] failed.*\n"
)
"""What failed, what was expected and got, a hint; then doit's sum. Both variants may fail for one reason."""


def truncate(project: Project) -> None:
    path = project.models / "net.onnx"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_model(build: Callable[[], onnx.ModelProto]) -> Change:
    def change(project: Project) -> None:
        write_model(build(), project.models / "net.onnx")
        project.write_spec(inputs={"x": {"shapes": [[2, 4]]}})

    return change


def with_external(change: Callable[[Path], object], **options: str) -> Change:
    """Replaces the model by one with external data, and then changes that file."""

    def changed(project: Project) -> None:
        location = options.get("location", "weights.bin")
        write_external_model(folding_net(), project.models / "net.onnx", location=location)
        change(project.models / location)

    return changed


def link_folder_out(path: Path) -> None:
    outside = path.parents[2] / "elsewhere"
    path.parent.rename(outside)
    path.parent.symlink_to(outside, target_is_directory=True)


# One case of each place that refuses: what each place refuses is in its stage's tests.
BAD: dict[str, tuple[Change, str]] = {
    "missing": (lambda p: (p.models / "net.onnx").unlink(), r"source model missing.*no such file"),
    "at home with nobody": (
        lambda p: p.write_spec(inputs=SHAPES, source={"path": "~nosuchuser/x.onnx"}),
        r"not a file path: ~nosuchuser/x\.onnx.*home",
    ),
    "a name that is too long": (
        lambda p: p.write_spec(inputs=SHAPES, source={"path": f"../{'n' * 300}/x.onnx"}),
        r"not a file path.*File name too long",
    ),
    "samples with a name that is too long": (
        lambda p: p.write_spec(inputs=SHAPES, samples=f"{'n' * 300}/x.npz"),
        r"cannot read the samples of net.*File name too long",
    ),
    "truncated": (truncate, r"not an ONNX model, or an incomplete one"),
    "an unknown operator": (with_model(models.unknown_operator), "Frobnicate"),
    "external data missing": (with_external(Path.unlink), r"external data missing: 'weights.bin'"),
    "external data in a linked folder": (
        with_external(link_folder_out, location="data/weights.bin"),
        "external data outside the model's folder.*link to",
    ),
}


@pytest.mark.parametrize(("change", "pattern"), BAD.values(), ids=BAD)
def test_a_bad_model_is_refused_by_name_and_the_old_bundle_stays(
    built: Project, change: Change, pattern: str
) -> None:
    change(built)
    with untouched(built):
        outcome = built.call("prepare")
    assert (outcome.code, outcome.out) == (1, "")
    told = FORM.search(outcome.err)
    assert told, outcome.err
    assert "net" in told["what"]
    assert re.search(pattern, told["what"] + told["details"], re.DOTALL), outcome.err
    assert "Traceback" not in outcome.err
    assert is_intact(built.bundle())


@pytest.mark.parametrize("change", ["missing", "truncated", "external data missing"])
def test_a_build_goes_on_once_the_model_is_mended(built: Project, change: str) -> None:
    BAD[change][0](built)
    assert built.call("prepare").code == 1
    write_model(folding_net(), built.models / "net.onnx")
    outcome = built.call("prepare")
    assert (outcome.code, outcome.err) == (0, "0 done, 7 up to date\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param("ortprep", marks=pytest.mark.manual), "doit"])
def test_a_model_whose_key_cannot_be_computed_keeps_no_other_from_being_explained_and_built(
    built: Project, command: str
) -> None:
    built.write_spec(inputs=SHAPES, source={"path": "~nosuchuser/x.onnx"})
    built.add(folding_net(), "zebra", inputs=SHAPES)
    explain, fetch = (
        (built.run("explain"), built.run("prepare"))
        if command == "ortprep"
        else (built.doit("explain"), built.doit("--continue", "fetch"))
    )
    assert explain.code == 0
    assert "net: fetch: runs, because\n    it would fail: not a file path" in explain.out
    assert "zebra: never done; runs fetch, " in explain.out
    assert "FAILED fetch:net\nerror: fetch of net: not a file path" in fetch.err
    assert "done fetch:zebra" in fetch.err
    assert "Traceback" not in explain.err + fetch.err


def test_what_explain_says_of_a_missing_model_is_what_prepare_will_say(built: Project) -> None:
    (built.models / "net.onnx").unlink()
    (reason,) = built.explain()["fetch"]
    assert reason.startswith("it would fail: source model missing")
    assert reason.partition("\n")[0].removeprefix("it would fail: ") in built.call("prepare").err


def reshaping_net() -> onnx.ModelProto:
    """`y` is `x` in the shape that `to` names: few values of `to` will do."""
    return models.build_model(
        [helper.make_node("Reshape", ["x", "to"], ["y"])],
        inputs=[
            models.value("x", TensorProto.FLOAT, [1, 64]),
            models.value("to", TensorProto.INT64, [2]),
        ],
        outputs=[models.value("y", TensorProto.FLOAT, ["a", "b"])],
        initializers=[],
    )


def test_a_model_that_does_not_run_on_made_up_values_says_so_first(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.add(reshaping_net(), inputs={"to": {"range": [3, 60]}})
    outcome = project.run("prepare")
    assert outcome.code == 1
    failed = outcome.err[outcome.err.index("FAILED") :]
    assert "the model does not run on the inputs chosen for its trial: net\n" in failed
    assert re.search(r"  x: float32 \[1, 64\], values made up: \S+, \S+, \S+, \S+, …\n", failed)
    assert re.search(r"  to: int64 \[2\], range as declared: \d+, \d+\n", failed)
    assert "hint: inputs: {NAME: {values: […]}}, or samples: FILES.npz, in net.yaml" in failed
    assert "step '" not in outcome.err, "no step of the ladder is to blame"
    assert failed.count("FAILED") == len(re.findall(r"FAILED optimize:", failed))
    project.write_spec(inputs={"to": {"values": [8]}})
    assert project.doit("optimize").code == 0
