"""What the doctor found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from ortprep.cli.console import build_table
from ortprep.doctor.diagnosis import Diagnosis, DiagnosisTable, Severity, TableCell

_BAR_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MARKS: dict[Severity, str] = {"ok": "ok", "note": "note", "advice": "advice", "problem": "PROBLEM"}


def build_diagnosis_table(table: DiagnosisTable) -> Table:
    """Returns a table; a column of bars is added where it is to be drawn as a waterfall."""
    headings = [
        f">{heading}" if any(isinstance(row[index], (int, float)) for row in table.rows) else heading
        for index, heading in enumerate(table.columns)
    ]
    rows = [[format_cell(cell) for cell in row] for row in table.rows]
    if table.bars is None:
        return build_table(table.title, headings, rows)
    bars = draw_waterfall(_figures(table))
    rows_with_bars = ([*row, bar] for row, bar in zip(rows, bars, strict=True))
    drawn = build_table(table.title, [*headings, ""], rows_with_bars)
    drawn.columns[-1].no_wrap = True
    return drawn


def _figures(table: DiagnosisTable) -> list[float]:
    index = table.columns.index(str(table.bars))
    return [float(row[index] or 0) for row in table.rows]


def draw_waterfall(figures: Sequence[float], *, cells: int = _BAR_CELLS) -> tuple[str, ...]:
    """Returns a bar for each figure; each begins where the one before it ended, and all fill the width."""
    total, begin, bars = sum(figures) or 1.0, 0.0, []
    for figure in figures:
        eighths = round(figure / total * cells * 8)
        whole, part = divmod(eighths, 8)
        bars.append(" " * int(begin / total * cells) + ("█" * whole + _EIGHTHS[part].strip() or "▏"))
        begin += figure
    return tuple(bars)


def format_cell(cell: TableCell) -> str:
    """Returns a cell's text: three digits that count, a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        if abs(cell) >= 100:
            return f"{cell:.0f}"
        return f"{cell:.3g}" if abs(cell) >= 0.01 else f"{cell:.2f}"
    return str(cell)


def describe_findings(diagnosis: Diagnosis) -> Iterator[str]:
    """Yields a line for each finding, and one for its hint."""
    for finding in diagnosis.findings:
        yield f"{diagnosis.check}: {_MARKS[finding.severity]}: {finding.text}"
        if finding.hint is not None:
            yield f"  hint: {finding.hint}"
