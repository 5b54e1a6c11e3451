"""What a measurement says: when plans are ready, by phases, steady runs and memory, per plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ortprep.bundle.manifest import MeasurementRecord, PlanFigures, VariantRecord
from ortprep.bundle.tuning_record import Summary
from ortprep.measuring.shipped import find_plan
from ortprep.report.content import Cell, Chart, ReportSection, ReportTable
from ortprep.report.formatting import CellValue, count_of, make_table, ratio_cell, rounded
from ortprep.report.speedup import DEFAULT, compare

PHASES: tuple[tuple[str, Callable[[PlanFigures], Summary]], ...] = (
    ("import", lambda plan: plan.import_ms),
    ("init", lambda plan: plan.init_ms),
    ("first run", lambda plan: plan.first_ms),
)

MEANINGS = {
    DEFAULT: "the source model in plain ONNX Runtime, optimised at every load",
    "first phase": "what serves first where `load_progressive` opens the bundle",
    "prepared": "what was prepared for this target",
    "portable": "the variant that runs on any machine",
}


def build_measurement_sections(variant: VariantRecord) -> Iterator[ReportSection]:
    """Yields a section for each page cache it was measured with, warm first."""
    for measurement in sorted(variant.measurements, key=lambda one: one.cache != "warm"):
        yield _section(measurement, shipped=variant.decision.shipped if variant.decision else "")


def _section(measurement: MeasurementRecord, *, shipped: str) -> ReportSection:
    cache = f"{measurement.cache} page cache"
    notes = [
        f"{count_of(measurement.rounds, 'round')}, one fresh process per plan and round, in turn; "
        f"inputs {measurement.shapes}.",
        *(f"{plan}: not measured, {reason}" for plan, reason in measurement.skipped.items()),
    ]
    if not measurement.plans:
        return ReportSection(f"Measured, {cache}", tuple(notes))
    meanings = [f"{plan.plan}: {MEANINGS[plan.plan]}" for plan in measurement.plans if plan.plan in MEANINGS]
    if meanings:
        notes.append(f"{'; '.join(meanings)}.")
    spreads = (
        _spread_chart(measurement, f"Ready, {cache}", "ms", lambda plan: plan.ready_ms),
        _spread_chart(measurement, f"Steady run, {cache}", "ms", lambda plan: plan.steady_ms),
        _spread_chart(measurement, f"Private memory, {cache}", "MB", lambda plan: plan.private_mb),
        _spread_chart(measurement, f"GPU memory, {cache}", "MB", lambda plan: plan.gpu_mb),
    )
    charts = (_waterfall(measurement, cache), *(chart for chart in spreads if chart is not None))
    return ReportSection(
        f"Measured, {cache}",
        tuple(notes),
        charts,
        (_plans_table(measurement, cache, shipped),),
        quiet=measurement.cache != "warm",
    )


def _waterfall(measurement: MeasurementRecord, cache: str) -> Chart:
    return Chart(
        kind="waterfall",
        title=f"From start to first result, {cache}",
        values=tuple(row for plan in measurement.plans for row in _phases(plan)),
        table=_phases_table(measurement, cache),
        parameters={},
        wide=True,
    )


def _phases(plan: PlanFigures) -> Iterator[Mapping[str, Any]]:
    start = 0.0
    for phase, figure in PHASES:
        end = start + figure(plan).median
        yield {
            "row": plan.plan,
            "phase": phase,
            "from": rounded(start),
            "to": rounded(end),
        }
        start = end


def _phases_table(measurement: MeasurementRecord, cache: str) -> ReportTable:
    columns = ("plan", ">ms to the first result", *(f">{phase} ms" for phase, _ in PHASES))
    rows: list[tuple[CellValue, ...]] = [
        (
            plan.plan,
            sum(figure(plan).median for _, figure in PHASES),
            *(figure(plan) for _, figure in PHASES),
        )
        for plan in measurement.plans
    ]
    return make_table(f"Phases of a load, {cache}", columns, rows)


def _spread_chart(
    measurement: MeasurementRecord, title: str, unit: str, figure: Callable[[PlanFigures], Summary | None]
) -> Chart | None:
    found = {plan.plan: summary for plan in measurement.plans if (summary := figure(plan)) is not None}
    if not found:
        return None
    return Chart(
        kind="spread",
        title=title,
        values=tuple(_spread_row(plan, summary) for plan, summary in found.items()),
        table=_summary_table(f"{title}, {unit}", found),
        parameters={"unit": unit},
    )


def _spread_row(name: str, summary: Summary) -> Mapping[str, Any]:
    return {
        "row": name,
        "median": rounded(summary.median),
        "p25": rounded(summary.p25),
        "p75": rounded(summary.p75),
        "low": rounded(summary.minimum),
        "high": rounded(summary.maximum),
    }


def _summary_table(caption: str, found: Mapping[str, Summary]) -> ReportTable:
    columns = ("plan", ">median", ">lower quartile", ">upper quartile", ">least", ">most", ">processes")
    rows = [
        (name, one.median, one.p25, one.p75, one.minimum, one.maximum, one.count)
        for name, one in found.items()
    ]
    return make_table(caption, columns, rows)


def _plans_table(measurement: MeasurementRecord, cache: str, shipped: str) -> ReportTable:
    columns = (
        "plan",
        ">ready ms",
        ">init ms",
        ">first run ms",
        ">steady ms",
        ">private MB",
        ">peak MB",
        ">GPU MB",
        ">ready sooner",
    )
    default = find_plan(measurement, DEFAULT)
    rows: list[tuple[CellValue, ...]] = [
        (
            f"{plan.plan} (shipped)" if plan.plan == shipped else plan.plan,
            plan.ready_ms,
            plan.init_ms,
            plan.first_ms,
            plan.steady_ms,
            plan.private_mb,
            plan.peak_mb,
            plan.gpu_mb,
            _sooner_cell(default, plan),
        )
        for plan in measurement.plans
    ]
    return make_table(f"All figures, {cache}: median ± half the distance between quartiles", columns, rows)


def _sooner_cell(default: PlanFigures | None, plan: PlanFigures) -> Cell:
    if default is None or plan is default:
        return ratio_cell(None)
    ratio = compare(default.ready_ms, plan.ready_ms)
    return ratio_cell(None) if ratio is None else Cell(str(ratio), ratio.value)
