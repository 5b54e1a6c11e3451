"""Places of a variant's recorded options in another layout: one loop for every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ortprep.bundle.loader_config import Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord

ATTRIBUTE = "session option"
ENTRY = "session entry"
LEVEL = "graph_optimization_level"


class RecordedOption(NamedTuple):
    """An option that a variant's session is made with.

    Attributes:
        kind: `session option`, `session entry`, or the name of an execution provider.
        name: ONNX Runtime's name of it.
        value: The recorded value.
    """

    kind: str
    name: str
    value: str | int | bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}={self.value}"


class Place(NamedTuple):
    """An option in another layout: a key and a value in one of its sections."""

    section: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.section}.{self.key}={self.value}"


@dataclass(frozen=True)
class MappedOptions:
    """A variant's options in another layout.

    Attributes:
        sections: Keys and values of each section of the layout.
        carried: Options that the layout has, and where.
        left_out: Options that it does not have, and why.
        session_options: The session options that remain.
        providers: The execution providers, with the options that remain.
    """

    sections: Mapping[str, Mapping[str, str]]
    carried: Mapping[str, str]
    left_out: Mapping[str, str]
    session_options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]

    def section(self, name: str) -> Mapping[str, str]:
        """Returns the keys and values of a section, none if nothing is there."""
        return self.sections.get(name, {})


def recorded_options(variant: Variant) -> Iterator[RecordedOption]:
    """Yields every option of a variant's session: level, attributes, entries, and those of its providers."""
    options = variant.session_options
    yield RecordedOption(ATTRIBUTE, LEVEL, options.graph_optimization_level)
    for name, value in options.attributes.items():
        yield RecordedOption(ATTRIBUTE, name, value)
    for key, entry in options.config_entries.items():
        yield RecordedOption(ENTRY, key, entry)
    for provider in variant.providers:
        for name, text in provider.options.items():
            yield RecordedOption(provider.name, name, text)


def map_options(
    variant: Variant, find_place: Callable[[RecordedOption], Place | str], properties: Mapping[str, str]
) -> MappedOptions:
    """Returns a variant's options in another layout; ONNX Runtime's defaults hold for those left out.

    Args:
        variant: Variant with the options.
        find_place: Returns the place of an option, or the reason why there is none.
        properties: Reasons why the layout lacks other properties: `first phase`, `io_binding`.
    """
    sections: dict[str, dict[str, str]] = {}
    carried: dict[str, str] = {}
    left_out: dict[str, str] = {}
    kept: dict[str, dict[str, str | int | bool]] = {}
    for option in recorded_options(variant):
        place = find_place(option)
        if isinstance(place, str):
            left_out[str(option)] = place
            continue
        sections.setdefault(place.section, {})[place.key] = place.value
        carried[str(option)] = str(place)
        kept.setdefault(option.kind, {})[option.name] = option.value
    present = {"first phase": variant.first_phase is not None, "io_binding": variant.io_binding}
    left_out |= {name: reason for name, reason in properties.items() if present[name]}
    attributes = kept.get(ATTRIBUTE, {})
    level = str(attributes.pop(LEVEL, "ORT_ENABLE_ALL"))
    return MappedOptions(
        sections,
        carried,
        left_out,
        SessionOptionsRecord(level, attributes, _texts(kept.get(ENTRY, {}))),
        tuple(ProviderRecord(one.name, _texts(kept.get(one.name, {}))) for one in variant.providers),
    )


def _texts(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}
