"""What was converted before the optimisation, and how near the answers stayed to the source's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.bundle.conversion_record import ConversionRecord, OutputAccuracy, PrecisionStep
from pipeline.bundle.manifest import VariantRecord
from pipeline.report.content import Cell, Column, Section, Table
from pipeline.report.wording import count_of, format_mb, number_cell, text_cell


def build_conversion_section(variant: VariantRecord) -> Section | None:
    """Returns passes, the ladder of precisions and the accuracy of every output; None if nothing changed."""
    record = variant.conversion
    if record is None:
        return None
    tables = []
    if record.steps:
        tables.append(_steps_table(record))
    if variant.accuracy:
        tables.append(_accuracy_table(variant.accuracy))
    return Section("Converted", tuple(_notes(record)), tables=tuple(tables))


def _notes(record: ConversionRecord) -> Iterator[str]:
    if record.asked != record.precision:
        yield f"In {record.precision}, since {record.asked} was not as accurate as the gate asks."
    if record.fused:
        fused = ", ".join(f"{count} {name}" for name, count in record.fused.items())
        yield f"Fused by {record.fused_by}: {fused}."
    if record.binding:
        bound = ", ".join(f"{name} = {size}" for name, size in record.binding.items())
        yield f"Dimensions bound: {bound}."
    for done in (*record.passes, *(one for step in record.steps[-1:] for one in step.passes)):
        seconds, peak = done.elapsed_ms / 1e3, format_mb(done.peak_rss_bytes)
        yield f"{done.name} took {seconds:.1f} s and {peak} at its peak."


def _steps_table(record: ConversionRecord) -> Table:
    columns = (
        Column("precision"),
        Column("outcome", wide=True),
        Column("nodes left in fp32", numeric=True),
        Column("trials", numeric=True),
        Column("which", wide=True),
    )
    return Table("Steps of the ladder of precisions", columns, tuple(map(_step_row, record.steps)))


def _step_row(step: PrecisionStep) -> tuple[Cell, ...]:
    return (
        text_cell(step.precision),
        text_cell(step.outcome, "good" if step.outcome == "taken" else "plain"),
        number_cell(len(step.kept), f"{len(step.kept)} of {count_of(step.nodes, 'node')}"),
        number_cell(step.trials),
        text_cell(", ".join(step.kept[:20]) + (", …" if len(step.kept) > 20 else "")),
    )


def _accuracy_table(accuracies: tuple[OutputAccuracy, ...]) -> Table:
    headings = ("SNR, dB", "cosine", "top-1", "largest difference", "mean difference", "elements")
    columns = (Column("output"), *(Column(heading, numeric=True) for heading in headings))
    rows = tuple(
        (
            text_cell(one.output),
            number_cell(one.snr_db, f"{one.snr_db:.1f}"),
            number_cell(one.cosine, f"{one.cosine:.6f}"),
            number_cell(one.top1, None if one.top1 is None else f"{one.top1:.4f}"),
            number_cell(one.max_abs, f"{one.max_abs:.3g}"),
            number_cell(one.mean_abs, f"{one.mean_abs:.3g}"),
            number_cell(one.elements),
        )
        for one in accuracies
    )
    return Table("Answers against the unconverted source's, per output", columns, rows, sortable=True)
