"""What `show` says of a bundle, and records of no build that are refused before anything says them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy, PrecisionStep
from ortprep.bundle.manifest import TrialRecord, TuningRecord, read_manifest, write_manifest
from ortprep.cli.tables import build_plans_table, build_variants_table, describe_bundle, describe_figures
from ortprep.errors import BundleError
from ortprep.measuring.shipped import worst_error

OLDER = sorted(path.parent for path in (Path(__file__).parents[1] / "compat").glob("*/*/manifest.json"))
RELEASED = read_manifest(OLDER[-1])
FIGURES = RELEASED.variants[0].measurements[0].plans[0]
TUNING = TuningRecord(
    runs_per_load=100,
    knobs={"form": ("mapped", "ort")},
    trials=(
        TrialRecord(0, {"plan": "default"}, FIGURES),
        TrialRecord(1, {"form": "mapped"}, FIGURES),
        TrialRecord(2, {"form": "ort"}, None, failure="the child died of signal 11\nmore of it"),
        TrialRecord(3, {"form": "ort"}, FIGURES, violations=("private memory 410 MB, allowed 400",)),
    ),
    chosen=1,
    reason="cost 0.86×",
    elapsed_s=212.5,
    first_phase=0,
    overlap_mb=141.0,
)
"""A search: trial 1 was chosen, 2 failed, and 3 takes too much memory."""


def manifest(**changes):
    """The manifest of a bundle with one variant, tuned."""
    return replace(RELEASED, variants=(replace(RELEASED.variants[0], **{"tuning": TUNING, **changes}),))


@pytest.mark.parametrize(
    "made",
    [
        *map(read_manifest, OLDER),
        manifest(),
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
        ({"trials": TUNING.trials * 2}, "each number of a trial once"),
        ({"knobs": {"form": ()}}, "values of every knob"),
        ({"elapsed_s": math.nan}, "seconds of a search"),
        ({"elapsed_s": math.inf}, "seconds of a search"),
    ],
)
def test_records_that_no_build_writes_are_refused_where_they_are_read(tmp_path, changes, problem):
    write_manifest(tmp_path, manifest(tuning=replace(TUNING, **changes)))
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
