"""The options that ONNX Runtime knows, as tables for people and as JSON for programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ortprep.bundle.codec import encode
from ortprep.errors import SpecError
from ortprep.options import (
    CUDA,
    NEWEST,
    OLDEST,
    Option,
    known_attributes,
    known_provider_options,
    known_session_config,
    version_parts,
)
from ortprep.versions import installed_onnxruntime

PROVIDERS = ("session", "cuda", "cpu")
"""What options may be asked for: those of the session itself, or of one execution provider."""

_EFFECT_WIDTH, _VALUES_WIDTH = 80, 30
_CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class OptionGroup:
    """Options that are set in one place: `session_config`, `attributes`, `cuda` or `cpu`."""

    name: str
    title: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Listing:
    """Groups that have any option, of a version of ONNX Runtime, and remarks for the reader."""

    version: str
    sections: tuple[OptionGroup, ...]
    remarks: tuple[str, ...]


def list_options(provider: str | None = None, *, version: str | None = None, part: str = "") -> Listing:
    """Returns options that ONNX Runtime knows, of a provider or all, whose names contain `part` in any case.

    Raises:
        SpecError: There is no such provider, or that is not a version.
    """
    if provider is not None and provider not in PROVIDERS:
        raise _unknown_provider(provider)
    chosen = (installed_onnxruntime() or NEWEST) if version is None else version
    _require_version(chosen)
    sections = tuple(_sections(provider, chosen))
    narrowed = (_narrow(section, part) for section in sections)
    found = tuple(section for section in narrowed if section.options)
    remarks = [*_version_remarks(version, chosen)]
    if not found:
        remarks.append(_nothing_found(sections, provider, part))
    return Listing(chosen, found, tuple(remarks))


def _unknown_provider(provider: str) -> SpecError:
    nearest = difflib.get_close_matches(provider.lower(), PROVIDERS, n=1, cutoff=0.3)
    return SpecError(
        f"unknown provider: {provider!r}\n  expected one of {', '.join(PROVIDERS)}",
        hint=f"ortprep options --provider {nearest[0]}" if nearest else "ortprep options",
    )


def _require_version(version: str) -> None:
    try:
        version_parts(version)
    except SpecError as error:
        raise SpecError(error.message, hint=f"ortprep options --onnxruntime {NEWEST}") from None


def _sections(provider: str | None, version: str) -> Iterator[OptionGroup]:
    if provider in (None, "session"):
        yield OptionGroup("session_config", "session config entries", known_session_config(version))
        yield OptionGroup("attributes", "attributes of SessionOptions", known_attributes(version))
    if provider in (None, "cuda"):
        yield OptionGroup("cuda", f"options of {CUDA}", known_provider_options(CUDA, version))
    if provider in (None, "cpu"):
        yield OptionGroup("cpu", f"options of {_CPU}", known_provider_options(_CPU, version))


def _narrow(section: OptionGroup, part: str) -> OptionGroup:
    wanted = part.lower()
    options = tuple(option for option in section.options if wanted in option.name.lower())
    return OptionGroup(section.name, section.title, options)


def _version_remarks(given: str | None, version: str) -> Iterator[str]:
    if given is None and installed_onnxruntime() is None:
        yield f"ONNX Runtime is not installed; these are the options of {version}"
    if version_parts(version) < version_parts(OLDEST):
        yield f"the first ONNX Runtime that is listed is {OLDEST}; these are its options"
    if version_parts(version) > version_parts(NEWEST):
        yield f"the last ONNX Runtime that is listed is {NEWEST}; {version} may have more"


def _nothing_found(sections: Sequence[OptionGroup], provider: str | None, part: str) -> str:
    if any(section.options for section in sections):
        return f"no option that was asked for has {part!r} in its name"
    return f"ONNX Runtime knows no options of provider {provider}"


def encode_listing(listing: Listing) -> dict[str, Any]:
    """Returns a listing as JSON types: the version, and one object per option."""
    return {
        "onnxruntime": listing.version,
        "options": [
            {"section": section.name, **encode(option), "expected": option.expected}
            for section in listing.sections
            for option in section.options
        ],
    }


def build_options_tables(listing: Listing) -> Iterator[Table]:
    """Yields a table per section, and one of the sources that are numbered in them."""
    sources = {option.source: None for section in listing.sections for option in section.options}
    numbers = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}
    for section in listing.sections:
        yield _build_section_table(section, listing.version, numbers)
    if numbers:
        yield _build_sources_table(numbers)


def _build_section_table(section: OptionGroup, version: str, numbers: Mapping[str, str]) -> Table:
    table = Table(title=f"{section.title}, ONNX Runtime {version}", box=box.SIMPLE_HEAD, leading=1)
    # Names have up to 63 characters: with a column of their own they would leave no room on a terminal of
    # 100. So an option's texts share two columns, and the second leaves the first as much as a name takes.
    table.add_column("option, effect", max_width=_EFFECT_WIDTH, overflow="fold")
    table.add_column("values, default, since", width=_VALUES_WIDTH, overflow="fold")
    for option in section.options:
        table.add_row(_describe(option), _describe_values(option, numbers[option.source]))
    return table


def _describe(option: Option) -> Text:
    text = Text.assemble((option.name, "bold"), f"\n{option.effect}")
    return text if option.owner is None else text.append(f"\nNot to be set: {option.owner}.", "italic")


def _describe_values(option: Option, number: str) -> Text:
    since = f"{option.since} or before" if option.since == OLDEST else option.since
    until = "" if option.until is None else f", until {option.until}"
    return Text(f"{option.expected}\ndefault {option.default}\nsince {since}{until} {number}")


def _build_sources_table(numbers: Mapping[str, str]) -> Table:
    table = Table(title="sources of names and versions", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for source, number in numbers.items():
        table.add_row(Text(number), Text(source))
    return table
