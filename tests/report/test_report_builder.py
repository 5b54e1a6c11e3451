"""What a report says, and that it says no more than was recorded."""

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy, PrecisionStep
from ortprep.bundle.figures import Samples
from ortprep.bundle.manifest import read_manifest, write_manifest
from ortprep.errors import BundleError
from ortprep.measuring.shipped import worst_error
from ortprep.report.content import ReportSubject
from ortprep.report.report_builder import build_report
from ortprep.report.speedup import compare, describe_gain, find_gain
from ortprep.report.trials import (
    build_search_section,
    build_trials_table,
    find_front,
    find_legs,
)
from ortprep.report.variant_sections import build_measurement_sections
from tests.report.builders import CHOSEN, around, manifest, measurement, subject, trial_figures, tuning


def report_of(*subjects):
    return build_report(subjects, version="0.1.0")


def sections_of(report):
    yield from report.sections
    for model in report.models:
        yield from model.history
        for variant in model.variants:
            yield from variant.sections
    yield from report.environments


def tables_of(report):
    return [table for section in sections_of(report) for table in section.tables]


def words_of(report):
    """Everything a page would say, in one text."""
    return repr(report)


def section(report, title):
    return next(one for one in sections_of(report) if one.title.startswith(title))


def column(table, title):
    index = table.columns.index(title)
    return [row[index] for row in table.cells]


VERSIONS = [
    subject(created_at="2026-11-19T08:30:00+00:00", sooner=3.0),
    subject(created_at="2026-11-21T08:30:00+00:00", sooner=8.0),
    subject(created_at="2026-11-20T08:30:00+00:00", sooner=5.0),
]
ALL = report_of(*VERSIONS, subject(name="other", faster=False), subject(name="plain", trials=0))


def test_every_part_the_user_asked_for_is_there():
    titles = [one.title for one in sections_of(ALL)]
    for title in (
        "How much sooner, how sure",
        "What was rebuilt, and why",
        "Ships prepared",
        "Measured, warm cache",
        "Measured, cold cache",
        "Search",
        "Verified",
        "Options, and why",
    ):
        assert title in titles


def test_every_row_has_a_cell_for_every_column():
    for table in tables_of(ALL):
        for row in table.cells:
            assert len(row) == len(table.columns), table.title
            assert all(cell.text for cell in row), table.title


# -- how much sooner, how sure


def cpu_of(made):
    return made.variants[0]


def test_a_gain_is_certain_only_where_the_measurement_said_so():
    sure = find_gain(cpu_of(manifest()))
    assert sure is not None
    assert sure.certainty == "beyond the noise"
    variant = cpu_of(manifest())
    assert variant.decision is not None
    unsure = find_gain(replace(variant, decision=replace(variant.decision, faster=False)))
    assert unsure is not None
    assert unsure.certainty == "within the noise"


def test_a_gain_is_that_of_forked_workers_where_they_decided():
    variant = cpu_of(manifest())
    forked = measurement(cache="forked", sooner=2.0)
    gain = find_gain(replace(variant, measurements=(forked, *variant.measurements)))
    assert gain is not None
    assert gain.plan == forked.plans[[plan.plan for plan in forked.plans].index("prepared")]


def test_where_the_default_is_shipped_nothing_is_claimed():
    gain = find_gain(cpu_of(manifest(faster=False)))
    assert gain is not None
    assert gain.certainty == "default shipped"
    assert gain.ready is not None
    assert (gain.ready.low, gain.ready.value, gain.ready.high) == (1.0, 1.0, 1.0)
    assert "sooner" not in describe_gain(gain).replace("not sooner", "")


def test_without_figures_of_the_default_nothing_is_compared():
    variant = cpu_of(manifest())
    (warm, _) = variant.measurements
    alone = replace(warm, plans=tuple(plan for plan in warm.plans if plan.plan != "default"))
    gain = find_gain(replace(variant, measurements=(alone,)))
    assert gain is not None
    assert gain.certainty == "not compared"
    assert gain.ready is None


def test_the_head_counts_the_variants_that_are_sooner_by_the_ratio_of_medians():
    ratio = compare(around(100.0), around(25.0))
    assert ratio is not None
    assert ratio.low < ratio.value == 4.0 < ratio.high
    [fact] = report_of(subject(name="a"), subject(name="b"), subject(name="c", faster=False)).facts
    assert (fact.label, fact.value) == ("sooner beyond the noise", "2 of 3")


@pytest.mark.parametrize("median", [0.0, -1.0, math.inf, math.nan])
def test_what_has_no_ratio_gets_none(median):
    broken = Samples((median,) * 3)
    assert compare(around(1.0), broken) is None


# -- measured


def test_plans_that_were_not_measured_are_named_with_the_reason():
    assert any("first phase: not measured, the child died" in note for note in section(ALL, "Measured").notes)


def test_forks_are_said_to_be_measured_after_the_others():
    variant = manifest().variants[0]
    warm = variant.measurements[0]
    with_fork = replace(warm, plans=(*warm.plans, replace(warm.plans[-1], plan="forked")))
    (ready, *_) = build_measurement_sections(replace(variant, measurements=(with_fork,)))
    assert "in turn, forked after the others; inputs" in ready.notes[0]


# -- the search


def test_every_trial_has_a_row_the_failed_ones_last():
    record = tuning(trials=40)
    table = build_trials_table(record, "")
    assert sorted(int(cell.text) for cell in column(table, "trial")) == list(range(40))
    assert table.is_long
    plans = [cell.text for cell in column(table, "plan")]
    assert plans[-1].endswith("; failed: the child died of signal 11")
    assert plans[0] == "form=prepacked; chosen; front"
    assert any(plan.endswith("; private memory 410 MB, allowed 400") for plan in plans)


eighths = st.integers(1, 8_000).map(lambda number: number / 8)
"""Milliseconds that floating-point numbers add and multiply without rounding."""


def search_of(places):
    """Returns a search whose plans are ready and run in these times."""
    chosen = tuning().trials[CHOSEN]
    trials = []
    for number, (ready, steady) in enumerate(places):
        figures = replace(trial_figures(1, 1), ready_ms=Samples((ready,)), steady_ms=Samples((steady,)))
        trials.append(replace(chosen, number=number, figures=figures, final=None))
    return replace(tuning(), trials=tuple(trials))


@given(st.lists(st.tuples(eighths, eighths), min_size=1, max_size=30))
def test_no_plan_of_the_front_is_beaten_in_both_figures_and_every_other_is(places):
    front = [places[trial.number] for trial in find_front(search_of(places))]
    assert front == sorted(set(front))
    assert [steady for _, steady in front] == sorted({steady for _, steady in front}, reverse=True)
    assert all(any(one[0] <= other[0] and one[1] <= other[1] for one in front) for other in places)


@given(st.lists(st.tuples(eighths, eighths), min_size=1, max_size=30))
def test_legs_cover_every_number_of_runs_once_and_name_the_cheapest_plan(places):
    legs = find_legs(search_of(places))
    assert (legs[0].first, legs[-1].to) == (1, None)
    assert all((one.to or 0) + 1 == other.first for one, other in itertools.pairwise(legs))
    for leg in legs:
        for runs in (leg.first, leg.to or 10_000):
            costs = [ready + (runs - 1) * steady for ready, steady in places]
            assert costs[leg.trial] == min(costs)


anything = st.floats() | st.sampled_from([1e300, math.nextafter(1e300, math.inf), 5e-324, 1e308])


@pytest.mark.attack
@example([(0.0, math.inf)])
@example([(1e300, 2.0), (math.nextafter(1e300, math.inf), 1.0)])
@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=30))
def test_there_are_no_more_legs_than_plans_whatever_a_manifest_says(places):
    record = search_of(places)
    legs = find_legs(record)
    assert len(legs) <= len(find_front(record))
    assert all(one.first <= (one.to or 0) == other.first - 1 for one, other in itertools.pairwise(legs))
    assert build_search_section(record).tables


@pytest.mark.attack
def test_a_manifest_of_thousands_of_plans_costs_no_square_of_them():
    count = 10_000
    record = search_of([(index**2 / 2, count - index) for index in range(count)])
    begun_s = time.monotonic()
    assert len(find_legs(record)) > count / 2
    assert time.monotonic() - begun_s < 5


def test_a_plan_beyond_a_limit_is_not_in_the_front():
    record = search_of([(1, 1), (2, 2)])
    beyond = replace(record.trials[0], violations=("private memory 900 MB, allowed 500",))
    assert find_front(replace(record, trials=(beyond, record.trials[1]))) == record.trials[1:]


def test_options_have_value_default_and_effect_from_onnx_runtimes_own_tables():
    table = section(ALL, "Options, and why").tables[0]
    rows = {row[1].text: row for row in table.cells}
    row = rows["session.use_device_allocator_for_initializers"]
    assert row[2].text == "1"
    assert row[3].text == "0"
    assert len(row[4].text) > 20
    assert "execution provider" in rows


# -- verification


def test_errors_are_told_against_tolerance_and_noise_floor():
    table = section(ALL, "Verified").tables[0]
    assert [cell.text for cell in column(table, "error, of its tolerance")] == ["0.02", "0.04"]
    assert [cell.text for cell in column(table, "noise floor, of its tolerance")] == ["0.015", "0.03"]


@pytest.mark.parametrize("ratio", [1.5, math.inf, math.nan])
def test_an_output_outside_its_tolerance_is_called_so(ratio):
    made = manifest()
    variant = cpu_of(made)
    bad = replace(variant.verification.errors[0], ratio=ratio)
    broken = replace(variant, verification=replace(variant.verification, errors=(bad,)))
    report = report_of(ReportSubject(replace(made, variants=(broken,))))
    (table,) = (one for one in section(report, "Verified").tables if one.title.startswith("Errors"))
    assert column(table, "error, of its tolerance")[0].text == f"{ratio:.2g}"
    assert column(table, "verdict")[0].tone == "bad"


# -- bundles, environment, history


def test_several_bundles_of_a_model_are_side_by_side_and_have_their_dates():
    (table,) = section(ALL, "How much sooner").tables
    assert [cell.text for cell in column(table, "prepared")][:3] == ["2026-11-19", "2026-11-21", "2026-11-20"]
    assert [model.name for model in ALL.models][2:] == ["net, 2026-11-20 08:30 UTC", "other", "plain"]


def test_equal_environments_are_told_once():
    report = report_of(*(subject(name=f"m{index}") for index in range(5)))
    assert len(report.environments) == 1
    assert "m0, m1, m2, m3 and m4" in report.environments[0].notes[0]
    values = {row[0].text: row[1].text for row in report.environments[0].tables[0].cells}
    assert values["hardware.memory_bytes"] == f"{64 * 2**30} (65536 MB)"
    assert values["packages.onnx"] == "1.23.2"


# -- whatever a manifest holds


BARE = replace(manifest(), variants=(), files=(), environment={}, missing_targets={})


def with_cpu(**changes):
    made = manifest()
    return replace(made, variants=(replace(cpu_of(made), **changes),))


WARM = cpu_of(manifest()).measurements[0]
ODD = {
    "bare": BARE,
    "odd version": replace(manifest(), environment={"onnxruntime": "not a version", "hardware": None}),
    "odd hardware": replace(
        manifest(), environment={"onnxruntime": None, "hardware": {"gpus": [{"name": "A"}]}}
    ),
    "no outputs": manifest(outputs=()),
    "no search": manifest(trials=0),
    "not measured": with_cpu(measurements=(), decision=None),
    "no plans": with_cpu(measurements=(replace(WARM, plans=()),)),
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_any_manifest_that_can_be_read_can_be_reported(made):
    report = report_of(ReportSubject(made), ReportSubject(replace(made, name="another")))
    assert report.models[0].name == made.name


def test_bundles_of_older_releases_can_be_reported():
    bundles = sorted((Path(__file__).parents[1] / "compat").glob("*/*/manifest.json"))
    assert bundles
    for path in bundles:
        report = report_of(ReportSubject(read_manifest(path.parent)))
        assert report.models[0].name in words_of(report)


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
    made = manifest()
    variant = replace(made.variants[0], tuning=replace(tuning(), **changes))
    write_manifest(tmp_path, replace(made, variants=(variant,)))
    with pytest.raises(BundleError, match=problem):
        read_manifest(tmp_path)


@pytest.mark.attack
def test_a_step_without_an_outcome_is_refused_where_it_is_read(tmp_path):
    made = manifest()
    conversion = ConversionRecord("int8", "int8", steps=(PrecisionStep("int8", ""),))
    write_manifest(tmp_path, replace(made, variants=(replace(made.variants[0], conversion=conversion),)))
    with pytest.raises(BundleError, match="outcome of every step"):
        read_manifest(tmp_path)


@pytest.mark.attack
def test_accuracy_of_any_size_has_a_ratio():
    conversion = ConversionRecord("int8", "int8", gate={"": {"snr_db": 40.0}})
    accuracy = (OutputAccuracy("y", snr_db=-1e9),)
    made = replace(manifest().variants[0], conversion=conversion, accuracy=accuracy)
    ratio = worst_error(made)
    assert ratio is not None
    assert ratio > 1e300
