"""What verification says: errors per output against their tolerance and the noise floor. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.bundle.manifest import OutputError, VariantRecord, VerificationRecord
from pipeline.report.content import Cell, Chart, Column, Section, Table
from pipeline.report.wording import count_of, number_cell, ratio_cell, text_cell

LEAST, MOST = 1e-6, 1e3
"""Errors of their tolerance beyond which a chart does not reach."""


def build_verification_section(variant: VariantRecord) -> Section:
    """Returns errors per output, the ladder, and what the lint found."""
    found = variant.verification
    judged = "Judged by the gate of its spec. " if variant.accuracy else ""
    notes = [
        f"{judged}Compared with the source without any optimisation on CPU, on "
        f"{count_of(found.samples, 'input')} ({found.inputs}), rtol {found.rtol:g} and atol {found.atol:g} "
        "where an output has none of its own. "
        "The noise floor is the error of the source itself under full optimisation."
    ]
    tables = [_findings_table(variant)] if any(attempt.findings for attempt in variant.ladder) else []
    if len(variant.ladder) > 1:
        tables.insert(0, _ladder_table(variant))
    charts = (_chart(found),) if found.errors else ()
    return Section("Verified", tuple(notes), charts, tuple(tables))


def _chart(found: VerificationRecord) -> Chart:
    return Chart(
        kind="errors",
        title="Errors of their tolerance, per output",
        text=_text(found),
        values=tuple(_rows(found)),
        table=_errors_table(found),
        parameters={},
        wide=True,
    )


def _text(found: VerificationRecord) -> str:
    worst = max(found.errors, key=lambda error: error.ratio)
    within = sum(error.ratio <= 1 for error in found.errors)
    verdict = f"{within} of {count_of(len(found.errors), 'output')} within tolerance"
    return f"{verdict}; the worst is {worst.output} at {worst.ratio:.2g} of its tolerance."


def _rows(found: VerificationRecord) -> Iterator[Mapping[str, Any]]:
    floors = {error.output: error for error in found.noise_floor}
    for error in found.errors:
        # What comes last is drawn on top.
        sides = {"noise floor": floors.get(error.output), "prepared": error}
        for what, one in sides.items():
            if one is None:
                continue
            at = _clamp(one.ratio)
            row: dict[str, Any] = {
                "row": error.output,
                "what": what,
                "at": at,
                "limit": 1,
                "told": f"{error.output}, {what}: {one.ratio:.2g} of its tolerance, "
                f"largest difference {one.max_abs:.2g}",
            }
            yield row | ({"least": LEAST, "error": at} if what == "prepared" else {})


def _clamp(ratio: float) -> float:
    return min(max(ratio, LEAST), MOST) if math.isfinite(ratio) else MOST


def _errors_table(found: VerificationRecord) -> Table:
    numbers = ("error, of its tolerance", "noise floor, likewise", "largest difference", "relative")
    columns = (
        Column("output"),
        Column("verdict"),
        *(Column(heading, numeric=True) for heading in numbers),
        Column("worst at"),
        Column("expected", numeric=True),
        Column("got", numeric=True),
        Column("input", wide=True),
    )
    floors = {error.output: error for error in found.noise_floor}
    rows = tuple(_row(error, floors.get(error.output)) for error in found.errors)
    return Table("Errors per output, the worst of all inputs", columns, rows, sortable=True)


def _row(error: OutputError, floor: OutputError | None) -> tuple[Cell, ...]:
    passed = error.ratio <= 1
    return (
        text_cell(error.output),
        text_cell("within" if passed else "outside", "good" if passed else "bad"),
        _small(error.ratio),
        _small(floor.ratio) if floor else ratio_cell(None),
        _small(error.max_abs),
        _small(error.max_rel),
        text_cell(f"[{', '.join(map(str, error.worst_index))}]"),
        number_cell(error.worst_expected, f"{error.worst_expected:.6g}"),
        number_cell(error.worst_got, f"{error.worst_got:.6g}"),
        text_cell(error.shapes),
    )


def _small(value: float) -> Cell:
    return number_cell(value, f"{value:.2g}")


def _ladder_table(variant: VariantRecord) -> Table:
    columns = (
        Column("step"),
        Column("outcome", wide=True),
        Column("took, ms", numeric=True),
        Column("peak MB", numeric=True),
    )
    rows = tuple(
        (
            text_cell(attempt.step),
            text_cell(attempt.outcome),
            number_cell(attempt.elapsed_ms),
            number_cell(attempt.peak_rss_bytes / 2**20),
        )
        for attempt in variant.ladder
    )
    return Table("Steps of the optimisation ladder", columns, rows)


def _findings_table(variant: VariantRecord) -> Table:
    columns = (
        Column("step"),
        Column("rule"),
        Column("severity"),
        Column("subject", wide=True),
        Column("finding", wide=True),
        Column("known as"),
    )
    rows = tuple(
        (
            text_cell(attempt.step),
            text_cell(finding.rule),
            text_cell(finding.severity, "bad" if finding.severity == "error" else "plain"),
            text_cell(finding.subject),
            text_cell(finding.detail),
            text_cell(finding.reference),
        )
        for attempt in variant.ladder
        for finding in attempt.findings
    )
    return Table("What the lint of the written graph found", columns, rows)
