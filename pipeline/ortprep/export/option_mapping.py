"""What becomes of a recorded option in a layout that is not a bundle's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ortprep.bundle.loader_config import Variant

LEVEL = "graph_optimization_level"


@dataclass(frozen=True)
class RecordedOption:
    """An option that a variant's session is made with.

    Attributes:
        kind: `session option`, `session entry`, or the name of an execution provider.
        name: As ONNX Runtime spells it.
        value: What is recorded.
    """

    kind: str
    name: str
    value: str | int | bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}={self.value}"


@dataclass(frozen=True)
class MappedOptions:
    """A recorded option that the export has."""

    option: RecordedOption
    where: str


@dataclass(frozen=True)
class UnmappedOption:
    """Something of a variant that the export does not have.

    Attributes:
        what: What it is; an option as `str(RecordedOption)` gives it.
        reason: Why, and what follows.
    """

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def recorded_options(variant: Variant) -> Iterator[RecordedOption]:
    """Yields every option of a variant's session: level, attributes, entries, and those of its providers."""
    options = variant.session_options
    yield RecordedOption("session option", LEVEL, options.graph_optimization_level)
    for name, value in options.attributes.items():
        yield RecordedOption("session option", name, value)
    for key, entry in options.config_entries.items():
        yield RecordedOption("session entry", key, entry)
    for provider in variant.providers:
        for name, text in provider.options.items():
            yield RecordedOption(provider.name, name, text)
