"""What becomes of a recorded option in a layout that is not a bundle's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.bundle.loader_config import Variant

LEVEL = "graph_optimization_level"


@dataclass(frozen=True)
class Recorded:
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
class Carried:
    """A recorded option that the export has.

    Attributes:
        option: The option.
        where: Where it is in what was written, as `parameters.intra_op_thread_count=2`.
    """

    option: Recorded
    where: str


@dataclass(frozen=True)
class LeftOut:
    """Something of a variant that the export does not have.

    Attributes:
        what: What it is; an option as `str(Recorded)` gives it.
        reason: Why, and what follows.
    """

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def recorded_options(variant: Variant) -> Iterator[Recorded]:
    """Yields every option of a variant's session: level, attributes, entries, and those of its providers."""
    options = variant.session_options
    yield Recorded("session option", LEVEL, options.graph_optimization_level)
    for name, value in options.attributes.items():
        yield Recorded("session option", name, value)
    for key, entry in options.config_entries.items():
        yield Recorded("session entry", key, entry)
    for provider in variant.providers:
        for name, text in provider.options.items():
            yield Recorded(provider.name, name, text)
