"""What a report says, as values: facts, tables, charts and the sections that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

_MAX_ROWS_TOLD = 6

Tone: TypeAlias = Literal["plain", "good", "warning", "bad"]
"""What a figure means; it is always said in words as well."""


@dataclass(frozen=True)
class Cell:
    """A table's entry.

    Attributes:
        text: As people read it, with a dash where there is no figure.
        value: What it is sorted by, None for text.
        tone: What it means.
        link: Identifier of the part of the page it leads to, "" for none.
    """

    text: str
    value: float | None = None
    tone: Tone = "plain"
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A table's column.

    Attributes:
        title: Heading, with the unit.
        numeric: Whether its cells are figures.
        wide: Whether its text may be long and is wrapped.
    """

    title: str
    numeric: bool = False
    wide: bool = False


@dataclass(frozen=True)
class ReportTable:
    """Figures or facts in rows; `filterable` by their text; `marked` is the row that stands out."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False
    filterable: bool = False
    marked: int | None = None


@dataclass(frozen=True)
class Chart:
    """A picture of figures, with what it shows in words and in a table.

    Attributes:
        kind: Which of `chart_specs.SPECS` draws it.
        title: What it shows.
        values: Rows of data.
        table: The same figures, exactly.
        parameters: What replaces `$NAME` in the specification.
        wide: Whether it takes the width of the page.
    """

    kind: str
    title: str
    values: tuple[Mapping[str, Any], ...]
    table: ReportTable
    parameters: Mapping[str, Any]
    wide: bool = False

    @property
    def text(self) -> str:
        """The first figures of the table in a sentence, for readers who cannot see the picture."""
        figure = next((i for i, column in enumerate(self.table.columns) if i and column.numeric), 0)
        words = "; ".join(f"{row[0].text}: {row[figure].text}" for row in self.table.rows[:_MAX_ROWS_TOLD])
        more = len(self.table.rows) - _MAX_ROWS_TOLD
        names = [self.table.columns[index].title for index in (0, figure)]
        heading = ", ".join(name for name in names if name)
        return f"{heading or self.title}: {words}{f'; and {more} more' if more > 0 else ''}."


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
    tables: tuple[ReportTable, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class VariantPart:
    """What is said of one variant."""

    title: str
    facts: tuple[Fact, ...]
    sections: tuple[ReportSection, ...]


@dataclass(frozen=True)
class ModelPart:
    """What is said of one model."""

    anchor: str
    name: str
    headline: str
    tone: Tone
    notes: tuple[str, ...]
    versions: tuple[ReportSection, ...]
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
