"""From a spec that converts to what jobs load: precisions, the gate and its ladder."""

import json
import sys

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.runtime import load
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.stages.optimize.requirements import find_integer_type
from tests.builders import matmul_net, write_model
from tests.prepare.builders import AS_PREPARED, QUICK, Project, answers, is_intact, source_answers
from tests.stages.convert.builders import outlier_net, overflowing_net

pytestmark = pytest.mark.slow

HAS_VNNI = bool({"avx512_vnni", "avx_vnni"} & set(read_hardware().cpu_features))
needs_int8 = pytest.mark.skipif(
    find_integer_type(read_hardware(gpus=False)) is None, reason="int8 needs VNNI or AMX on x86"
)
INPUTS = {"x": {"shapes": [[2, 64], [1, 64]]}}

CONVERT = {
    # The CPU has no kernels for bf16, so that one goes down the ladder.
    "precision": ["int8", "bf16"],
    "ladder": ["bf16", "fp32"],
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("converted"))
    project.add(matmul_net(layers=6), inputs=INPUTS, convert=CONVERT, tune=AS_PREPARED)
    outcome = project.run("prepare")
    assert outcome.code == 0, outcome.err
    assert is_intact(project.bundle())
    return project


@pytest.fixture(scope="module")
def manifest(converted):
    return read_manifest(converted.bundle())


@pytest.fixture(scope="module")
def config(converted):
    return read_loader_config(converted.bundle())


def test_every_precision_is_a_variant_verified_and_measured(manifest):
    variants = {record.name: record for record in manifest.variants}
    assert set(variants) == {"cpu", "cpu-int8", "portable"}
    for name, record in variants.items():
        assert bool(record.accuracy) == ("int8" in name)
        assert bool(record.verification.errors) == ("int8" not in name)
        assert record.measurements


def test_a_precision_that_steps_down_to_fp32_is_left_out_with_its_reasons(manifest):
    left_out = {one.variant: one for one in manifest.left_out}
    assert set(left_out) == {"cpu-bf16"}
    conversion = left_out["cpu-bf16"].conversion
    assert [step.precision for step in conversion.steps] == ["bf16", "fp32"]
    assert "MatMul" in conversion.steps[0].outcome


@pytest.mark.parametrize("precision", ["fp32", "int8", "fastest-within-gate"])
def test_a_job_gets_the_precision_it_asks_for(converted, config, precision):
    feeds = {"x": np.random.default_rng(3).random((5, 64), np.float32)}
    session = load(converted.bundle(), precision=precision, check="golden")
    got = answers(session, feeds)["y"]
    expected = source_answers(converted.models / "net.onnx", feeds)["y"]
    error = float(np.abs(got - expected).max())
    taken = config.variants[0].precision if precision == "fastest-within-gate" else precision
    assert (error > 1e-4) == (taken == "int8")
    # Without VNNI, products of 8-bit numbers saturate on the way.
    assert error < (0.2 if HAS_VNNI else 0.3) * float(np.abs(expected).max())


def test_another_gate_converts_precisions_again_and_nothing_else(converted):
    convert = {**CONVERT, "gate": {"snr_db": 14.0}}
    converted.write_spec(inputs=INPUTS, convert=convert, tune=AS_PREPARED)
    reasons = converted.explain()
    assert "convert/cpu-int8" in reasons
    assert not {"fetch", "optimize/cpu", "verify/cpu", "measure/cpu"} & set(reasons)


def test_a_gate_that_nothing_passes_fails_the_build_and_says_by_how_much(tmp_path):
    project = Project(tmp_path)
    convert = {"precision": "int8", "gate": {"snr_db": 150}, "search": {"max_trials": 0}}
    project.add(matmul_net(layers=2), inputs=INPUTS, convert=convert)
    outcome = project.doit("convert:net/cpu-int8")
    assert outcome.code != 0
    for text in ("no precision of the ladder works", "'y'", "at least 150", "convert: {ladder"):
        assert text in outcome.out + outcome.err
    assert list(project.work().glob("*cpu-int8*")) == []


SEARCHES = {
    # Nodes ranked by their errors: the first trial keeps the worst one.
    "int8": (outlier_net, {"quantize": {"mode": "static"}, "gate": {"snr_db": 10}}, {"matmul7"}),
    # Only what passes from one of them to the other is in float16, and beyond its range.
    "fp16": (overflowing_net, {}, {"halve", "swap"}),
}


@pytest.mark.parametrize("precision", SEARCHES)
def test_as_few_nodes_stay_in_fp32_as_the_gate_needs(tmp_path, precision):
    make, convert, kept = SEARCHES[precision]
    project = Project(tmp_path)
    shapes = {"x": {"shapes": [[4, 32]]}}
    project.add(make(), inputs=shapes, convert={"precision": precision, **convert}, tune=AS_PREPARED)
    outcome = project.doit(f"convert:net/cpu-{precision}")
    assert outcome.code == 0, outcome.err
    receipt = json.loads((project.work() / "receipts" / f"convert-cpu-{precision}.json").read_text())
    (step,) = receipt["result"]["conversion"]["steps"]
    assert set(step["kept"]) == kept
    assert step["trials"] > 0


# -- int8 where it is faster, judged by what an application answers: by the commands that a user types

APPLICATION = """
import sys
import numpy as np
import onnxruntime

net = onnxruntime.InferenceSession("models/net.onnx", providers=["CPUExecutionProvider"])
for seed in range(4):
    x = np.random.default_rng(seed).normal(size=(64, 1024)).astype(np.float32)
    (y,) = net.run(None, {"x": x})
    print(y.tobytes().hex() if sys.argv[1] == "exact" else int(y.mean(axis=0).argmax()))
"""


def make_project(root):
    made = Project(root)
    write_model(matmul_net(size=1024, layers=4), made.models / "net.onnx")
    (made.root / "app.py").write_text(APPLICATION)
    made.configs.mkdir()
    (made.configs / "defaults.yaml").write_text(json.dumps({"tune": AS_PREPARED, "measure": QUICK}))
    return made


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Returns an adopted project with int8 that its application judged."""
    made = make_project(tmp_path_factory.mktemp("judged") / "project")
    adopt(made, "rounded")
    outcome = made.run("prepare")
    assert outcome.code == 0, outcome.err
    return made


def adopt(project, *arguments):
    judged = ("--precision", "auto", "--judge", "stdout", "--record-inputs", "4")
    outcome = project.run("adopt", *judged, "--", sys.executable, "app.py", *arguments)
    assert outcome.code == 0, outcome.err
    assert "they may be private; no bundle and no registry gets them" in outcome.err.replace("\n", " ")


def change_spec(project, **convert):
    spec = project.configs / "net.yaml"
    lines = [line for line in spec.read_text().splitlines() if not line.startswith("convert: ")]
    spec.write_text("\n".join([*lines, f"convert: {json.dumps(convert)}", ""]))


@needs_int8
def test_an_application_gets_int8_that_it_judged_until_that_is_switched_off(judged):
    samples = sorted((judged.configs / "samples" / "net").iterdir())
    assert [oct(path.stat().st_mode & 0o777) for path in samples] == ["0o600"] * 4
    assert read_loader_config(judged.bundle()).variants[0].judged
    records = {one.name: one for one in read_manifest(judged.bundle()).variants}
    conversion = records["cpu-int8"].conversion
    assert (conversion.calibration.count, conversion.judged_on.count) == (2, 2)
    assert [records[name].verification.samples for name in ("cpu", "cpu-int8")] == [4, 2]
    assert (conversion.verdict.equal, conversion.verdict.lines) == (4, 4)
    assert "4 of 4 lines of stdout the same" in judged.run("show", "net").out.replace("\n", " ")

    command = ("run", "--verbose", "--", sys.executable, "app.py", "rounded")
    assert "variant cpu-int8" in judged.run(*command).err
    switched_off = {**judged.environment(), "ORTPREP_PRECISION": "fp32"}
    assert "cpu-int8" not in judged.run(*command, env=switched_off).err


@needs_int8
def test_no_real_input_is_in_a_bundle(judged):
    kept = {
        row.tobytes()
        for path in (judged.configs / "samples" / "net").iterdir()
        for row in read_tensors(path)["x"]
    }
    content = b"".join(path.read_bytes() for path in judged.bundle().rglob("*") if path.is_file())
    assert len(kept) == 4 * 64
    assert not any(row in content for row in kept)


@needs_int8
def test_what_the_application_refuses_is_left_out_and_fp32_ships(judged, tmp_path):
    project = judged.copy_to(tmp_path / "copy")
    judge = {"run": [sys.executable, "app.py", "exact"], "folder": ".."}
    change_spec(project, precision="auto", judge=judge, search={"max_trials": 0})
    outcome = project.call("prepare")
    assert outcome.code == 0, outcome.err
    manifest = read_manifest(project.bundle())
    (left_out,) = manifest.left_out
    assert left_out.variant == "cpu-int8"
    assert "0 of 4 lines of stdout the same, expected at least 1" in left_out.reason
    assert "cpu-int8" not in [variant.name for variant in manifest.variants]
