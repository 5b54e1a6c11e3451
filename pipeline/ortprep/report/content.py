"""The content of a report as values: facts, tables and the sections that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from ortprep.tables import Table, Tone


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
