"""Sections on one variant: its conversion, measurements, verification and options. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from ortprep.bundle.conversion_record import ConversionRecord
from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.manifest import MeasurementRecord, OutputError, VariantRecord
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import SpecError
from ortprep.measuring.shipped import FORKED, describe_cache, find_plan
from ortprep.options import (
    NEWEST,
    Option,
    known_attributes,
    known_provider_options,
    known_session_config,
    version_parts,
)
from ortprep.report.content import ReportSection, ReportSubject
from ortprep.report.speedup import DEFAULT
from ortprep.report.trials import build_knobs_table, find_chosen
from ortprep.tables import Cell, CellValue, Table, count_of, fill_table, number_cell

_Figure: TypeAlias = tuple[str, Callable[[PlanFigures], CellValue]]

_FIGURES: tuple[_Figure, ...] = (
    ("ready ms", lambda plan: plan.ready_ms),
    ("init ms", lambda plan: plan.init_ms),
    ("first run ms", lambda plan: plan.first_ms),
    ("steady ms", lambda plan: plan.steady_ms),
    ("private MB", lambda plan: plan.private_mb),
    ("peak MB", lambda plan: plan.peak_mb),
    ("GPU MB", lambda plan: plan.gpu_mb),
)

MEANINGS = {
    DEFAULT: "the source model in plain ONNX Runtime, optimised at every load",
    "first phase": "what serves until the prepared plan is ready",
    "prepared": "what was prepared for this target",
    "portable": "the variant that runs on any machine",
    "forked": "a fork of a process that has loaded what ships, on one thread, from the fork on",
}
"""What each plan of a measurement is."""

_SESSION = "session"
_MAX_KEPT = 20


# -- converted


def build_conversion_section(variant: VariantRecord) -> Iterator[ReportSection]:
    """Yields passes, the ladder of precisions and the accuracy of every output, if anything was converted."""
    record = variant.conversion
    if record is None:
        return
    steps = fill_table(
        "Steps of the ladder of precisions",
        record.steps,
        (
            ("precision", lambda step: step.precision),
            ("outcome", lambda step: Cell(step.outcome, tone="good" if step.outcome == "taken" else "plain")),
            (
                "nodes left in fp32",
                lambda step: number_cell(
                    len(step.kept), f"{len(step.kept)} of {count_of(step.nodes, 'node')}"
                ),
            ),
            ("trials", lambda step: step.trials),
            ("which", lambda step: ", ".join(step.kept[:_MAX_KEPT]) + ", …" * (len(step.kept) > _MAX_KEPT)),
        ),
    )
    accuracy = fill_table(
        "Answers against the unconverted source's, per output",
        variant.accuracy,
        (
            ("output", lambda one: one.output),
            ("SNR, dB", lambda one: number_cell(one.snr_db, f"{one.snr_db:.1f}")),
            ("cosine", lambda one: number_cell(one.cosine, f"{one.cosine:.6f}")),
            ("top-1", lambda one: None if one.top1 is None else number_cell(one.top1, f"{one.top1:.4f}")),
            ("largest difference", lambda one: _short(one.max_abs)),
            ("mean difference", lambda one: _short(one.mean_abs)),
            ("elements", lambda one: one.elements),
        ),
    )
    tables = tuple(table for table in (steps, accuracy) if table.rows)
    notes = [f"{line[:1].upper()}{line[1:]}." for line in describe_conversion(record)]
    if record.asked != record.precision:
        notes.insert(0, f"In {record.precision}, since {record.asked} missed the accuracy gate.")
    yield ReportSection("Converted", tuple(notes), tables=tables)


def _short(value: float) -> Cell:
    return number_cell(value, f"{value:.3g}")


def describe_conversion(record: ConversionRecord) -> Iterator[str]:
    """Yields what was fused and bound, and which inputs and what judged it."""
    if record.fused:
        yield f"fused by {record.fused_by}: {', '.join(f'{n} {name}' for name, n in record.fused.items())}"
    if record.binding:
        yield f"bound to {', '.join(f'{name}={size}' for name, size in record.binding.items())}"
    for what, samples in (("calibrated", record.calibration), ("judged", record.judged_on)):
        if samples is not None:
            yield f"{what} on {count_of(samples.count, 'input')} ({samples.digest})"
    if record.verdict is not None:
        yield f"judged by {record.verdict}"


# -- measured


def build_measurement_sections(variant: VariantRecord) -> Iterator[ReportSection]:
    """Yields a section for each page cache it was measured with, warm first, and for forks compared."""
    shipped = variant.decision.shipped if variant.decision else ""
    for measurement in sorted(variant.measurements, key=lambda one: one.cache != "warm"):
        cache = describe_cache(measurement)
        meanings = [f"{one.plan}: {MEANINGS[one.plan]}" for one in measurement.plans if one.plan in MEANINGS]
        but = f", {FORKED} after the others" if find_plan(measurement, FORKED) else ""
        notes = (
            f"{count_of(measurement.rounds, 'round')}, one fresh process per plan and round, in turn{but}; "
            f"inputs {measurement.shapes}.",
            *(f"{plan}: not measured, {reason}" for plan, reason in measurement.skipped.items()),
            *([f"{'; '.join(meanings)}."] if meanings else []),
        )
        title = f"All figures, {cache}: median ± half the distance between quartiles"
        tables = (build_plans_table(measurement, title, shipped=shipped),) if measurement.plans else ()
        yield ReportSection(f"Measured, {cache}", notes, tables, quiet=measurement.cache != "warm")


def build_plans_table(measurement: MeasurementRecord, title: str, *, shipped: str = "") -> Table:
    """Returns a row per figure and a column per plan.

    Args:
        measurement: The plans' figures.
        title: The table's title.
        shipped: Name of the plan that is marked as shipped.
    """

    def column(plan: PlanFigures) -> tuple[str, Callable[[_Figure], CellValue]]:
        heading = f"{plan.plan} (shipped)" if plan.plan == shipped else plan.plan
        return heading, lambda figure: figure[1](plan)

    figures = [
        (name, read) for name, read in _FIGURES if any(read(plan) is not None for plan in measurement.plans)
    ]
    return fill_table(title, figures, (("figure", lambda figure: figure[0]), *map(column, measurement.plans)))


# -- verified


def build_verification_section(variant: VariantRecord) -> ReportSection:
    """Returns errors per output against tolerance and noise floor, the ladder, and what the lint found."""
    found = variant.verification
    judged = "Judged by the gate of its spec. " if variant.accuracy else ""
    note = (
        f"{judged}Compared with the source without any optimisation on CPU, on "
        f"{count_of(found.samples, 'input')} ({found.inputs}), rtol {found.rtol:g} and atol {found.atol:g} "
        "where an output has none of its own. "
        "The noise floor is the error of the source itself under full optimisation."
    )
    errors = _errors_table(found.errors, {error.output: error.ratio for error in found.noise_floor})
    ladder = fill_table(
        "Steps of the optimisation ladder",
        variant.ladder if len(variant.ladder) > 1 else (),
        (
            ("step", lambda attempt: attempt.step),
            ("outcome", lambda attempt: attempt.outcome),
            ("took, ms", lambda attempt: attempt.elapsed_ms),
            ("peak MB", lambda attempt: attempt.peak_rss_bytes / 2**20),
        ),
    )
    findings = fill_table(
        "What the lint of the written graph found",
        [(attempt.step, finding) for attempt in variant.ladder for finding in attempt.findings],
        (
            ("step", lambda row: row[0]),
            ("rule", lambda row: row[1].rule),
            (
                "severity",
                lambda row: Cell(row[1].severity, tone="bad" if row[1].severity == "error" else "plain"),
            ),
            ("subject", lambda row: row[1].subject),
            ("finding", lambda row: row[1].detail),
            ("known as", lambda row: row[1].reference),
        ),
    )
    tables = tuple(table for table in (errors, ladder, findings) if table.rows)
    return ReportSection("Verified", (note,), tables=tables)


def _errors_table(errors: tuple[OutputError, ...], floors: Mapping[str, float]) -> Table:
    """Returns one row per output, with the noise floor of that output."""

    def small(value: float | None) -> Cell | None:
        return None if value is None else number_cell(value, f"{value:.2g}")

    def verdict(error: OutputError) -> Cell:
        return Cell("within", tone="good") if error.ratio <= 1 else Cell("outside", tone="bad")

    return fill_table(
        "Errors per output, the worst of all inputs",
        errors,
        (
            ("output", lambda error: error.output),
            ("error, of its tolerance", lambda error: small(error.ratio)),
            ("verdict", verdict),
            ("noise floor, of its tolerance", lambda error: small(floors.get(error.output))),
            ("largest difference", lambda error: small(error.max_abs)),
            ("relative", lambda error: small(error.max_rel)),
            ("worst at", lambda error: f"[{', '.join(map(str, error.worst_index))}]"),
            ("expected", lambda error: number_cell(error.worst_expected, f"{error.worst_expected:.6g}")),
            ("got", lambda error: number_cell(error.worst_got, f"{error.worst_got:.6g}")),
            ("input", lambda error: error.shapes),
        ),
    )


# -- options


def build_options_section(subject: ReportSubject, variant: VariantRecord) -> Iterator[ReportSection]:
    """Yields the options jobs load a variant with, and why, where they are known."""
    plan = _loaded_with(subject, variant)
    if plan is None:
        return
    options, providers = plan
    known = _known_options(subject, providers)
    chosen = [(_SESSION, "graph_optimization_level", options.graph_optimization_level)]
    for name, value in {**options.attributes, **options.config_entries}.items():
        chosen.append((_SESSION, name, str(int(value)) if isinstance(value, bool) else str(value)))
    for provider in providers:
        chosen.append((provider.name, "execution provider", "used"))
        chosen += [(provider.name, name, text) for name, text in provider.options.items()]
    table = fill_table(
        "What a session is made with",
        [(*row, known.get(row[:2])) for row in chosen],
        (
            ("where", lambda row: row[0]),
            ("option", lambda row: row[1]),
            ("value", lambda row: row[2]),
            ("ONNX Runtime’s own", lambda row: row[3].default if row[3] else None),
            ("effect", lambda row: row[3].effect if row[3] else None),
        ),
    )
    notes, tables = ["Options that are not listed keep ONNX Runtime's own defaults."], [table]
    if variant.tuning is None:
        notes.append("There was no search for this variant.")
    elif knobs := build_knobs_table(variant.tuning):
        tables.append(knobs)
    yield ReportSection("Options, and why", tuple(notes), tables=tuple(tables))


def _loaded_with(
    subject: ReportSubject, variant: VariantRecord
) -> tuple[SessionOptionsRecord, tuple[ProviderRecord, ...]] | None:
    """Returns what the loader config says of a variant's session, else what its search chose."""
    for listed in subject.loader.variants if subject.loader else ():
        if listed.name == variant.name:
            return listed.session_options, listed.providers
    trial = find_chosen(variant.tuning) if variant.tuning else None
    if trial is None or trial.session_options is None:
        return None
    return trial.session_options, trial.providers


def _known_options(
    subject: ReportSubject, providers: tuple[ProviderRecord, ...]
) -> Mapping[tuple[str, str], Option]:
    """Returns what is known of the options of the ONNX Runtime that prepared a bundle, by place and name."""
    version = str(subject.manifest.environment.get("onnxruntime", NEWEST))
    try:
        version_parts(version)
    except SpecError:
        version = NEWEST
    known = {
        (_SESSION, option.name): option
        for option in (*known_attributes(version), *known_session_config(version))
    }
    for provider in providers:
        options = known_provider_options(provider.name, version)
        known |= {(provider.name, option.name): option for option in options}
    return known
