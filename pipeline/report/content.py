"""What a report says, as values: facts, tables, charts and the sections that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
class Table:
    """Figures or facts in rows.

    Attributes:
        caption: What it shows.
        columns: Headings.
        rows: One cell per column.
        sortable: Whether headings sort it.
        filterable: Whether rows can be filtered by their text.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False
    filterable: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture of figures, with what it shows in words and in a table.

    Attributes:
        kind: Which of `chart_specs.SPECS` draws it.
        title: What it shows.
        text: The same in a sentence with the figures that matter, for whom the picture is none.
        values: Rows of data.
        table: The same figures, exactly.
        parameters: What replaces `$NAME` in the specification.
        wide: Whether it takes the width of the page.
    """

    kind: str
    title: str
    text: str
    values: tuple[Mapping[str, Any], ...]
    table: Table
    parameters: Mapping[str, Any]
    wide: bool = False


@dataclass(frozen=True)
class Fact:
    """One figure that stands alone.

    Attributes:
        value: With its unit.
        label: What it is.
        detail: How sure it is, or what it is made of.
        tone: What it means.
    """

    value: str
    label: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Section:
    """A part of what is said of a model.

    Attributes:
        title: Heading.
        notes: Sentences below it.
        charts: Pictures.
        tables: Tables.
        quiet: Whether it is closed until somebody asks.
    """

    title: str
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class VariantPart:
    """What is said of one variant.

    Attributes:
        title: Name, target and level.
        facts: What was gained.
        sections: The rest.
    """

    title: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class ModelPart:
    """What is said of one model.

    Attributes:
        anchor: Identifier in the page.
        name: Of the model.
        headline: What was gained, in a few words.
        tone: What that means.
        notes: Where it came from, and what is missing.
        versions: How it changed from version to version, if there are several.
        history: What was rebuilt, and why, if that is known.
        variants: What was made of it.
    """

    anchor: str
    name: str
    headline: str
    tone: Tone
    notes: tuple[str, ...]
    versions: tuple[Section, ...]
    history: tuple[Section, ...]
    variants: tuple[VariantPart, ...]


@dataclass(frozen=True)
class Report:
    """All of a report.

    Attributes:
        title: Of the page.
        subtitle: Of what, made by what.
        facts: What was gained over all models.
        sections: Overview of the models.
        models: One part each.
        environments: Where it was measured.
    """

    title: str
    subtitle: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    models: tuple[ModelPart, ...]
    environments: tuple[Section, ...]
