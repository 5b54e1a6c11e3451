"""From a spec that converts to what jobs load: precisions, buckets, the gate and its ladder."""

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.runtime import load
from ortprep.runtime.machine.hardware import read_hardware
from tests.builders import matmul_net
from tests.prepare.builders import AS_PREPARED, Project, answers, is_intact, source_answers
from tests.stages.convert.builders import outlier_net, overflowing_net

pytestmark = pytest.mark.slow

HAS_VNNI = bool({"avx512_vnni", "avx_vnni"} & set(read_hardware().cpu_features))
INPUTS = {"x": {"shapes": [[2, 64], [1, 64]]}}

CONVERT = {
    # The CPU has no kernels for bf16, so that one goes down the ladder.
    "precision": ["int8", "bf16"],
    "shapes": [{"batch": 1}],
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


def test_every_precision_and_bucket_is_a_variant_verified_and_measured(manifest):
    variants = {record.name: record for record in manifest.variants}
    assert set(variants) == {"cpu", "cpu-int8", "cpu-batch1", "cpu-int8-batch1", "portable"}
    for name, record in variants.items():
        assert bool(record.accuracy) == ("int8" in name)
        assert bool(record.verification.errors) == ("int8" not in name)
        assert record.measurements


def test_a_precision_that_steps_down_to_fp32_is_left_out_with_its_reasons(manifest):
    left_out = {one.variant: one for one in manifest.left_out}
    assert set(left_out) == {"cpu-bf16", "cpu-bf16-batch1"}
    conversion = left_out["cpu-bf16"].conversion
    assert conversion is not None
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


def test_a_bucket_takes_its_sizes_only_and_is_never_taken_unasked(converted):
    session = load(converted.bundle(), target="cpu-batch1", check="golden")
    assert session.get_inputs()[0].shape == [1, 64]
    assert load(converted.bundle()).get_inputs()[0].shape[0] != 1


def test_show_puts_the_variants_side_by_side(converted):
    outcome = converted.call("show", "net")
    assert outcome.code == 0, outcome.err
    for text in ("cpu-int8-batch1", "SNR dB", "left out cpu-bf16", "batch=1"):
        assert text in outcome.out


def test_another_gate_converts_precisions_again_and_nothing_else(converted):
    convert = {**CONVERT, "gate": {"cosine": 0.98}}
    converted.write_spec(inputs=INPUTS, convert=convert, tune=AS_PREPARED)
    reasons = converted.explain()
    assert "convert/cpu-int8" in reasons
    assert not {"fetch", "optimize/cpu", "verify/cpu", "convert/cpu-batch1", "measure/cpu"} & set(reasons)


def test_a_gate_that_nothing_passes_fails_the_build_and_says_by_how_much(tmp_path):
    project = Project(tmp_path)
    convert = {"precision": "int8", "gate": {"snr_db": 150}, "search": {"max_trials": 0}}
    project.add(matmul_net(layers=2), inputs=INPUTS, convert=convert)
    outcome = project.doit("convert:net/cpu-int8")
    assert outcome.code != 0
    for text in ("no precision of the ladder works", "'y'", "at least 150", "convert: {ladder"):
        assert text in outcome.out + outcome.err
    assert list(project.work().glob("*cpu-int8*")) == []


@pytest.mark.skipif(not HAS_VNNI, reason="without VNNI no quantised layer comes to 40.5 dB")
def test_as_few_nodes_as_do_are_left_unquantised(tmp_path):
    project = Project(tmp_path)
    # Both layers quantised come to 39 dB, one of them to 42.
    project.add(matmul_net(layers=2), inputs=INPUTS, convert={"precision": "int8", "gate": {"snr_db": 40.5}})
    outcome = project.doit("convert:net/cpu-int8")
    assert outcome.code == 0, outcome.err
    assert "keeping 1 of 2 nodes passes the gate" in outcome.out + outcome.err


def test_the_node_with_the_largest_error_is_left_unquantised_first(tmp_path):
    project = Project(tmp_path)
    convert = {"precision": "int8", "quantize": {"mode": "static"}}
    project.add(outlier_net(layers=24, bad=7), inputs={"x": {"shapes": [[8, 32]]}}, convert=convert)
    outcome = project.doit("convert:net/cpu-int8")
    said = outcome.out + outcome.err
    assert outcome.code == 0, said
    assert "largest errors of single nodes: matmul7 (100.0%)" in said
    assert "trial 1: keeping 1 of 24 nodes passes the gate" in said
    assert "trial 2" not in said


@pytest.mark.manual
def test_mixed_precision_keeps_the_nodes_that_overflow_and_no_others(tmp_path):
    project = Project(tmp_path)
    project.add(overflowing_net(), inputs={"x": {"shapes": [[2, 32]]}}, convert={"precision": "mixed"})
    outcome = project.doit("convert:net/cpu-mixed")
    assert outcome.code == 0, outcome.err
    assert "keeping 2 of 103 nodes passes the gate" in outcome.out + outcome.err
    assert project.leftovers() == []
