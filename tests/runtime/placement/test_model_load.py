"""What a model asks of a device is what the variants ask that a worker there would load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.manifest import (
    Decision,
    MeasurementRecord,
    VariantRecord,
    VerificationRecord,
    read_manifest,
    write_manifest,
)
from ortprep.runtime.placement.model_load import read_load
from tests.runtime.builders import BUCKETED, COLUMNS, ROWS, write_converted

MB = 2**20
STEADY_MS = {part.name: 1.0 + part.seed for part in BUCKETED}
PRIVATE_MB = {part.name: 10.0**part.seed for part in BUCKETED}


def summary(median: float) -> Samples:
    return Samples((median,) * 3)


def record_of(name: str, *, plan: str = "prepared") -> VariantRecord:
    ms, mb = summary(STEADY_MS[name]), summary(PRIVATE_MB[name])
    figures = PlanFigures(plan, ms, ms, ms, ms, ms, mb, mb)
    verification = VerificationRecord(1e-3, 1e-5, 1, "seeded", (), ())
    measured = (MeasurementRecord("warm", 3, "x=[2,8]", (figures,)),)
    return VariantRecord(name, "cpu", "all", (), verification, measured, Decision(plan, True, "sooner"))


@pytest.fixture
def bundle(tmp_path):
    folder = write_converted(tmp_path / "bundle")
    manifest = read_manifest(folder)
    records = tuple(record_of(part.name) for part in BUCKETED)
    write_manifest(folder, dataclasses.replace(manifest, variants=records))
    return folder


def files_bytes(bundle: Path, *names: str) -> int:
    return sum(file.stat().st_size for name in names for file in (bundle / name).glob("*.onnx*"))


@pytest.mark.parametrize(
    ("precision", "buckets", "names"),
    [
        ("fp32", True, ["cpu", "cpu-batch4", "cpu-batch8"]),
        ("fp32", False, ["cpu"]),
        ("int8", True, ["cpu-int8", "cpu-int8-batch4"]),
        ("fastest-within-gate", True, ["cpu", "cpu-batch4", "cpu-batch8"]),
    ],
)
@pytest.mark.parametrize("copies", [1, 3])
def test_memory_is_that_of_all_that_is_loaded_and_time_that_of_the_variant_for_all_shapes(
    bundle, precision, buckets, names, copies
):
    load = read_load("m", bundle, "cpu", copies=copies, precision=precision, buckets=buckets)
    private = sum(int(PRIVATE_MB[name] * MB) for name in names)
    assert load.memory_bytes == private * copies + files_bytes(bundle, *names)
    assert load.cost_ms == STEADY_MS[names[0]]


def test_without_measurements_the_size_of_the_weights_stands_for_both(tmp_path):
    bundle = write_converted(tmp_path / "bundle")
    load = read_load("m", bundle, "cpu", buckets=False)
    assert load.memory_bytes == files_bytes(bundle, "cpu") > ROWS * COLUMNS * 4
    assert load.cost_ms == load.memory_bytes / MB


def test_a_portable_graph_that_is_shipped_for_a_target_costs_what_it_was_measured_at(tmp_path):
    parts = (dataclasses.replace(BUCKETED[0], name="portable"),)
    bundle = write_converted(tmp_path / "bundle", parts)
    manifest = read_manifest(bundle)
    records = (record_of("cpu", plan="portable"),)
    write_manifest(bundle, dataclasses.replace(manifest, variants=records))
    assert read_load("m", bundle, "cpu").cost_ms == STEADY_MS["cpu"]
