"""What verification says: errors per output against their tolerance and the noise floor. Pure."""

from __future__ import annotations

from ortprep.bundle.manifest import OutputError, VariantRecord, VerificationRecord
from ortprep.report.content import Cell, ReportSection, ReportTable
from ortprep.report.formatting import CellValue, count_of, make_table, number_cell, ratio_cell, text_cell


def build_verification_section(variant: VariantRecord) -> ReportSection:
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
    if found.errors:
        tables.insert(0, _errors_table(found))
    return ReportSection("Verified", tuple(notes), tables=tuple(tables))


def _errors_table(found: VerificationRecord) -> ReportTable:
    columns = (
        "output",
        ">error, of its tolerance",
        "verdict",
        ">noise floor, of its tolerance",
        ">largest difference",
        ">relative",
        "worst at",
        ">expected",
        ">got",
        "~input",
    )
    floors = {error.output: error for error in found.noise_floor}
    rows = tuple(_row(error, floors.get(error.output)) for error in found.errors)
    return make_table("Errors per output, the worst of all inputs", columns, rows, sortable=True)


def _row(error: OutputError, floor: OutputError | None) -> tuple[CellValue, ...]:
    passed = error.ratio <= 1
    return (
        error.output,
        _small(error.ratio),
        text_cell("within" if passed else "outside", "good" if passed else "bad"),
        _small(floor.ratio) if floor else ratio_cell(None),
        _small(error.max_abs),
        _small(error.max_rel),
        f"[{', '.join(map(str, error.worst_index))}]",
        number_cell(error.worst_expected, f"{error.worst_expected:.6g}"),
        number_cell(error.worst_got, f"{error.worst_got:.6g}"),
        error.shapes,
    )


def _small(value: float) -> Cell:
    return number_cell(value, f"{value:.2g}")


def _ladder_table(variant: VariantRecord) -> ReportTable:
    columns = ("step", "~outcome", ">took, ms", ">peak MB")
    rows = tuple(
        (attempt.step, attempt.outcome, attempt.elapsed_ms, attempt.peak_rss_bytes / 2**20)
        for attempt in variant.ladder
    )
    return make_table("Steps of the optimisation ladder", columns, rows)


def _findings_table(variant: VariantRecord) -> ReportTable:
    columns = ("step", "rule", "severity", "~subject", "~finding", "known as")
    rows = tuple(
        (
            attempt.step,
            finding.rule,
            text_cell(finding.severity, "bad" if finding.severity == "error" else "plain"),
            finding.subject,
            finding.detail,
            finding.reference,
        )
        for attempt in variant.ladder
        for finding in attempt.findings
    )
    return make_table("What the lint of the written graph found", columns, rows)
