"""What a measurement says: when plans are ready, by phases, steady runs and memory, per plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.bundle.manifest import MeasurementRecord, PlanFigures, VariantRecord
from pipeline.bundle.summary import Summary
from pipeline.report.content import Cell, Chart, Column, Section, Table
from pipeline.report.gains import DEFAULT, compare, find_plan
from pipeline.report.wording import (
    count_of,
    format_number,
    format_ratio,
    format_spread,
    join_words,
    number_cell,
    ratio_cell,
    rounded,
    spread_cell,
    text_cell,
)

PHASES: tuple[tuple[str, Callable[[PlanFigures], Summary]], ...] = (
    ("import", lambda plan: plan.import_ms),
    ("init", lambda plan: plan.init_ms),
    ("first run", lambda plan: plan.first_ms),
)

MEANINGS = {
    DEFAULT: "the source model in plain ONNX Runtime, optimised at every load",
    "first phase": "what serves first where `load_progressive` opens the bundle",
    "recipe": "the graph optimised once, weights inside one file, optimisation off",
    "prepared": "what was prepared for this target",
    "portable": "the variant that runs on any machine",
}


def build_measurement_sections(variant: VariantRecord) -> Iterator[Section]:
    """Yields a section for each page cache it was measured with, warm first."""
    for measurement in sorted(variant.measurements, key=lambda one: one.cache != "warm"):
        yield _section(measurement, shipped=variant.decision.shipped if variant.decision else "")


def _section(measurement: MeasurementRecord, *, shipped: str) -> Section:
    cache = f"{measurement.cache} page cache"
    notes = [
        f"{count_of(measurement.rounds, 'round')}, one fresh process per plan and round, in turn; "
        f"inputs {measurement.shapes}.",
        *(f"{plan}: not measured, {reason}" for plan, reason in measurement.skipped.items()),
    ]
    if not measurement.plans:
        return Section(f"Measured, {cache}", tuple(notes))
    told = [f"{plan.plan}: {MEANINGS[plan.plan]}" for plan in measurement.plans if plan.plan in MEANINGS]
    if told:
        notes.append(f"{'; '.join(told)}.")
    spreads = (
        _spread_chart(measurement, f"Ready, {cache}", "ms", lambda plan: plan.ready_ms),
        _spread_chart(measurement, f"Steady run, {cache}", "ms", lambda plan: plan.steady_ms),
        _spread_chart(measurement, f"Private memory, {cache}", "MB", lambda plan: plan.private_mb),
        _spread_chart(measurement, f"Peak memory, {cache}", "MB", lambda plan: plan.peak_mb),
        _spread_chart(measurement, f"GPU memory, {cache}", "MB", lambda plan: plan.gpu_mb),
    )
    charts = (_waterfall(measurement, cache), *(chart for chart in spreads if chart is not None))
    return Section(
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
        text=_waterfall_text(measurement),
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
            "told": f"{plan.plan}, {phase}: {format_spread(figure(plan))} ms",
        }
        start = end


def _waterfall_text(measurement: MeasurementRecord) -> str:
    lines = [
        f"{plan.plan} {format_number(sum(figure(plan).median for _, figure in PHASES))} ms "
        f"({', '.join(f'{phase} {format_number(figure(plan).median)}' for phase, figure in PHASES)})"
        for plan in measurement.plans
    ]
    return f"Medians from the start of the import to the first result: {'; '.join(lines)}."


def _phases_table(measurement: MeasurementRecord, cache: str) -> Table:
    columns = (Column("plan"), *(Column(f"{phase} ms", numeric=True) for phase, _ in PHASES))
    rows = tuple(
        (text_cell(plan.plan), *(spread_cell(figure(plan)) for _, figure in PHASES))
        for plan in measurement.plans
    )
    return Table(f"Phases of a load, {cache}", columns, rows)


def _spread_chart(
    measurement: MeasurementRecord, title: str, unit: str, figure: Callable[[PlanFigures], Summary | None]
) -> Chart | None:
    found = {plan.plan: summary for plan in measurement.plans if (summary := figure(plan)) is not None}
    if not found:
        return None
    return Chart(
        kind="spread",
        title=title,
        text=_spread_text(found, unit),
        values=tuple(_spread_row(plan, summary, unit) for plan, summary in found.items()),
        table=build_summary_table(f"{title}, {unit}", found),
        parameters={"unit": unit},
    )


def _spread_row(name: str, summary: Summary, unit: str) -> Mapping[str, Any]:
    return {
        "row": name,
        "median": rounded(summary.median),
        "p25": rounded(summary.p25),
        "p75": rounded(summary.p75),
        "low": rounded(summary.minimum),
        "high": rounded(summary.maximum),
        "told": f"{name}: {format_spread(summary)} {unit}, "
        f"from {format_number(summary.minimum)} to {format_number(summary.maximum)}",
    }


def _spread_text(found: Mapping[str, Summary], unit: str) -> str:
    told = [f"{plan} {format_spread(summary)} {unit}" for plan, summary in found.items()]
    return f"{join_words(told)}; lines reach from least to most, boxes from quartile to quartile."


def build_summary_table(caption: str, found: Mapping[str, Summary]) -> Table:
    """Returns the order statistics behind a chart, by what they are of; the caption has their unit."""
    names = ("median", "lower quartile", "upper quartile", "least", "most")
    columns = (Column(""), *(Column(name, numeric=True) for name in names), Column("processes", numeric=True))
    rows = tuple(
        (
            text_cell(name),
            *(number_cell(value) for value in _statistics(summary)),
            Cell(str(summary.count), summary.count),
        )
        for name, summary in found.items()
    )
    return Table(caption, columns, rows)


def _statistics(summary: Summary) -> tuple[float, ...]:
    return (summary.median, summary.p25, summary.p75, summary.minimum, summary.maximum)


def _plans_table(measurement: MeasurementRecord, cache: str, shipped: str) -> Table:
    headings = (
        "ready ms", "init ms", "first run ms", "steady ms", "private MB", "peak MB", "GPU MB",
    )  # fmt: skip
    columns = (
        Column("plan"),
        *(Column(heading, numeric=True) for heading in headings),
        Column("ready sooner", numeric=True),
    )
    default = find_plan(measurement, DEFAULT)
    rows = tuple(
        (
            text_cell(f"{plan.plan} (shipped)" if plan.plan == shipped else plan.plan),
            *(spread_cell(summary) for summary in _figures(plan)),
            _sooner_cell(default, plan),
        )
        for plan in measurement.plans
    )
    return Table(f"All figures, {cache}: median ± half the distance between quartiles", columns, rows)


def _figures(plan: PlanFigures) -> tuple[Summary | None, ...]:
    return (
        plan.ready_ms,
        plan.init_ms,
        plan.first_ms,
        plan.steady_ms,
        plan.private_mb,
        plan.peak_mb,
        plan.gpu_mb,
    )


def _sooner_cell(default: PlanFigures | None, plan: PlanFigures) -> Cell:
    if default is None or plan is default:
        return ratio_cell(None)
    ratio = compare(default.result_ms, plan.result_ms)
    if ratio is None:
        return ratio_cell(None)
    return Cell(
        f"{format_ratio(ratio.value)} [{format_ratio(ratio.low)}–{format_ratio(ratio.high)}]", ratio.value
    )
