"""What `show` says of a bundle, and records of no build that are refused before anything says them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy, PrecisionStep
from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.manifest import (
    MANIFEST_SCHEMA_VERSION,
    Decision,
    LadderAttempt,
    Manifest,
    MeasurementRecord,
    OutputError,
    SourceRecord,
    TrialRecord,
    TuningRecord,
    VariantRecord,
    VerificationRecord,
    read_manifest,
    write_manifest,
)
from ortprep.cli.tables import (
    build_plans_table,
    build_variants_table,
    describe_bundle,
    describe_figures,
)
from ortprep.errors import BundleError
from ortprep.measuring.shipped import worst_error

BASE = {"form": "mapped", "threads": "all"}


def figures(plan, ready, steady):
    return PlanFigures(
        plan=plan,
        ready_ms=Samples((ready,)),
        init_ms=Samples((ready * 0.6,)),
        first_ms=Samples((ready * 0.4,)),
        steady_ms=Samples((steady,)),
        private_mb=Samples((80.0,)),
        peak_mb=Samples((160.0,)),
        cost_ratio=Samples(((ready + 99 * steady) / 2250,)),
    )


def trial(number, choice, ready, steady):
    return TrialRecord(number, choice, figures("trial", ready, steady))


def tuning():
    """A search: trial 2 was chosen, 3 failed, and 4 takes too much memory."""
    failure = {"figures": None, "failure": "the child died of signal 11\nmore of it"}
    violation = {"violations": ("private memory 410 MB, allowed 400",)}
    trials = (
        trial(0, {"plan": "default"}, 270, 20),
        trial(1, BASE, 62, 20.2),
        trial(2, BASE | {"form": "prepacked"}, 33, 19.4),
        replace(trial(3, BASE | {"form": "ort"}, 1, 1), **failure),
        replace(trial(4, BASE | {"threads": "1"}, 35, 70), **violation),
    )
    return TuningRecord(
        runs_per_load=100,
        knobs={"form": ("mapped", "prepacked", "ort"), "threads": ("all", "1")},
        trials=trials,
        chosen=2,
        reason="cost 0.86×",
        elapsed_s=212.5,
        first_phase=1,
        overlap_mb=141.0,
    )


def manifest(**changes):
    """The manifest of a bundle with one variant, tuned."""
    error = OutputError("logits", "image=[1, 3]", 2e-5, 2e-4, (0, 17), 3.25, 3.2504, 0.02)
    cpu = VariantRecord(
        name="cpu",
        target="cpu",
        level="extended",
        ladder=(LadderAttempt("all", "the lint found an error"), LadderAttempt("extended", "taken")),
        verification=VerificationRecord(1e-3, 1e-5, 4, "seeded", (error,), (replace(error, ratio=0.015),)),
        measurements=(
            MeasurementRecord(
                "warm", 7, "image=[1, 3]", (figures("default", 270, 20), figures("prepared", 33, 19.4))
            ),
        ),
        decision=Decision("prepared", reason="prepared is ready sooner than default"),
        tuning=tuning(),
    )
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name="net",
        created_at="2026-11-20T08:30:00+00:00",
        pipeline_version="0.1.0",
        spec_digest=digest_bytes(b"net"),
        source=SourceRecord(
            "path", "net.onnx", digest_bytes(b"source"), (), {"": 17}, 8, {"Conv": 53}, 98 * 2**20
        ),
        environment={"onnxruntime": "1.31.1"},
        variants=(replace(cpu, **changes),),
        files=(FileEntry("cpu/net.onnx", 98 * 2**20, digest_bytes(b"weights")),),
    )


OLDER = sorted(path.parent for path in (Path(__file__).parents[1] / "compat").glob("*/*/manifest.json"))


@pytest.mark.parametrize(
    "made",
    [
        *map(read_manifest, OLDER),
        replace(manifest(), variants=(), files=(), environment={}),
        replace(manifest(), environment={"onnxruntime": None, "packages": "odd"}),
        manifest(measurements=(), decision=None, tuning=None),
        manifest(measurements=(replace(manifest().variants[0].measurements[0], plans=()),)),
    ],
    ids=lambda made: made.name,
)
def test_any_manifest_that_can_be_read_can_be_shown(made):
    assert describe_bundle(made)
    assert len(build_variants_table(made).cells) == len(made.variants)
    assert bool([*describe_figures(made)]) == any(variant.measurements for variant in made.variants)
    assert all(build_plans_table(one, "").cells for v in made.variants for one in v.measurements if one.plans)


# -- manifests that no build writes


@pytest.mark.attack
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trials": tuning().trials * 2}, "each number of a trial once"),
        ({"knobs": {"form": ()}}, "values of every knob"),
        ({"elapsed_s": math.nan}, "seconds of a search"),
        ({"elapsed_s": math.inf}, "seconds of a search"),
    ],
)
def test_records_that_no_build_writes_are_refused_where_they_are_read(tmp_path, changes, problem):
    write_manifest(tmp_path, manifest(tuning=replace(tuning(), **changes)))
    with pytest.raises(BundleError, match=problem):
        read_manifest(tmp_path)


@pytest.mark.attack
def test_a_step_without_an_outcome_is_refused_where_it_is_read(tmp_path):
    conversion = ConversionRecord("int8", "int8", steps=(PrecisionStep("int8", ""),))
    write_manifest(tmp_path, manifest(conversion=conversion))
    with pytest.raises(BundleError, match="outcome of every step"):
        read_manifest(tmp_path)


@pytest.mark.attack
def test_accuracy_of_any_size_has_a_ratio():
    conversion = ConversionRecord("int8", "int8", gate={"": {"snr_db": 40.0}})
    accuracy = (OutputAccuracy("y", snr_db=-1e9),)
    ratio = worst_error(manifest(conversion=conversion, accuracy=accuracy).variants[0])
    assert ratio > 1e300
