"""A report as values: its subjects, and the facts, tables and sections made of them."""

from __future__ import annotations

from dataclasses import dataclass

from ortprep.bundle.loader_config import LoaderConfig
from ortprep.bundle.manifest import Manifest
from ortprep.tables import Table, Tone


@dataclass(frozen=True)
class ReportSubject:
    """One bundle of a model.

    Attributes:
        manifest: Its record.
        loader: Loader config of the bundle, None if only the manifest was given.
        history: The tasks of its build, one per row, if they are known.
    """

    manifest: Manifest
    loader: LoaderConfig | None = None
    history: Table | None = None


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
