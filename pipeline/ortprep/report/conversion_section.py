"""What was converted before the optimisation, and how near the answers stayed to the source's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy, PrecisionStep
from ortprep.bundle.manifest import VariantRecord
from ortprep.report.content import ReportSection, ReportTable
from ortprep.report.formatting import CellValue, count_of, format_mb, make_table, number_cell, text_cell


def build_conversion_section(variant: VariantRecord) -> ReportSection | None:
    """Returns passes, the ladder of precisions and the accuracy of every output; None if nothing changed."""
    record = variant.conversion
    if record is None:
        return None
    tables = []
    if record.steps:
        tables.append(_steps_table(record))
    if variant.accuracy:
        tables.append(_accuracy_table(variant.accuracy))
    return ReportSection("Converted", tuple(_notes(record)), tables=tuple(tables))


def _notes(record: ConversionRecord) -> Iterator[str]:
    if record.asked != record.precision:
        yield f"In {record.precision}, since {record.asked} missed the accuracy gate."
    if record.fused:
        fused = ", ".join(f"{count} {name}" for name, count in record.fused.items())
        yield f"Fused by {record.fused_by}: {fused}."
    if record.binding:
        bound = ", ".join(f"{name} = {size}" for name, size in record.binding.items())
        yield f"Dimensions bound: {bound}."
    for done in (*record.passes, *(one for step in record.steps[-1:] for one in step.passes)):
        seconds, peak = done.elapsed_ms / 1e3, format_mb(done.peak_rss_bytes)
        yield f"{done.name} took {seconds:.1f} s and {peak} at its peak."


def _steps_table(record: ConversionRecord) -> ReportTable:
    columns = ("precision", "~outcome", ">nodes left in fp32", ">trials", "~which")
    return make_table("Steps of the ladder of precisions", columns, tuple(map(_step_row, record.steps)))


def _step_row(step: PrecisionStep) -> tuple[CellValue, ...]:
    return (
        step.precision,
        text_cell(step.outcome, "good" if step.outcome == "taken" else "plain"),
        number_cell(len(step.kept), f"{len(step.kept)} of {count_of(step.nodes, 'node')}"),
        step.trials,
        ", ".join(step.kept[:20]) + (", …" if len(step.kept) > 20 else ""),
    )


def _accuracy_table(accuracies: tuple[OutputAccuracy, ...]) -> ReportTable:
    columns = (
        "output",
        ">SNR, dB",
        ">cosine",
        ">top-1",
        ">largest difference",
        ">mean difference",
        ">elements",
    )
    rows = tuple(
        (
            one.output,
            number_cell(one.snr_db, f"{one.snr_db:.1f}"),
            number_cell(one.cosine, f"{one.cosine:.6f}"),
            number_cell(one.top1, None if one.top1 is None else f"{one.top1:.4f}"),
            number_cell(one.max_abs, f"{one.max_abs:.3g}"),
            number_cell(one.mean_abs, f"{one.mean_abs:.3g}"),
            one.elements,
        )
        for one in accuracies
    )
    return make_table("Answers against the unconverted source's, per output", columns, rows, sortable=True)
