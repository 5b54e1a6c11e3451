"""The content of a report as values: facts, tables, charts and the sections that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortprep.tables import Table, Tone

_MAX_ROWS_TOLD = 6


@dataclass(frozen=True)
class Chart:
    """A picture of figures, with what it shows in words and in a table.

    Attributes:
        kind: `waterfall` or `front`: which specification draws it.
        title: Title of the chart.
        values: Rows of data.
        table: The same figures, exactly.
        parameters: Replacements of `$NAME` in the specification.
    """

    kind: str
    title: str
    values: tuple[Mapping[str, Any], ...]
    table: Table
    parameters: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The first figures of the table in a sentence, for readers who cannot see the picture."""
        table = self.table
        figure = next((i for i, is_numeric in enumerate(table.numeric) if i and is_numeric), 0)
        words = "; ".join(f"{row[0].text}: {row[figure].text}" for row in table.cells[:_MAX_ROWS_TOLD])
        more = len(table.rows) - _MAX_ROWS_TOLD
        heading = ", ".join((table.columns[0], table.columns[figure]))
        return f"{heading}: {words}{f'; and {more} more' if more > 0 else ''}."


@dataclass(frozen=True)
class Fact:
    """One figure that stands alone; `detail` says how sure it is, or what it is made of."""

    value: str
    label: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class ReportSection:
    """A part of what is said of a model; a `quiet` one is closed at first."""

    title: str
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class VariantPart:
    """The part of a report on one variant."""

    title: str
    facts: tuple[Fact, ...]
    sections: tuple[ReportSection, ...]


@dataclass(frozen=True)
class ModelPart:
    """The part of a report on one bundle of a model."""

    anchor: str
    name: str
    headline: str
    tone: Tone
    notes: tuple[str, ...]
    history: tuple[ReportSection, ...]
    variants: tuple[VariantPart, ...]


@dataclass(frozen=True)
class Report:
    """All of a report."""

    title: str
    subtitle: str
    facts: tuple[Fact, ...]
    sections: tuple[ReportSection, ...]
    models: tuple[ModelPart, ...]
    environments: tuple[ReportSection, ...]
