"""`ortprep options`: what ONNX Runtime knows, as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from ortprep.bundle.codec import encode
from ortprep.cli.command import AsJson, Output, command
from ortprep.cli.console import echo
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

_EFFECT_WIDTH, _VALUES_WIDTH = 80, 30


class OptionOwner(StrEnum):
    """The owner of an option: the session itself, or an execution provider."""

    SESSION = "session"
    CUDA = "cuda"


@dataclass(frozen=True)
class OptionGroup:
    """Options that are set in one place: `session_config`, `attributes` or `cuda`."""

    name: str
    title: str
    options: tuple[Option, ...]


def list_options(version: str, owner: OptionOwner | None = None, *, part: str = "") -> list[OptionGroup]:
    """Returns options that ONNX Runtime knows, of an owner or all, whose names contain `part` in any case.

    Raises:
        SpecError: The text is no version.
    """
    groups = []
    if owner in (None, OptionOwner.SESSION):
        groups.append(("session_config", "session config entries", known_session_config(version)))
        groups.append(("attributes", "attributes of SessionOptions", known_attributes(version)))
    if owner in (None, OptionOwner.CUDA):
        groups.append(("cuda", f"options of {CUDA}", known_provider_options(CUDA, version)))
    matching = (
        OptionGroup(name, title, tuple(option for option in options if part.lower() in option.name.lower()))
        for name, title, options in groups
    )
    return [group for group in matching if group.options]


def describe_version(version: str) -> Iterator[str]:
    """Yields what to know of the tables of a version that they do not end at."""
    if version_parts(version) < version_parts(OLDEST):
        yield f"the oldest ONNX Runtime in the table is {OLDEST}; these are its options"
    if version_parts(version) > version_parts(NEWEST):
        yield f"the newest ONNX Runtime in the table is {NEWEST}; {version} may have more"


def encode_groups(version: str, groups: Iterable[OptionGroup]) -> dict[str, Any]:
    """Returns groups as JSON types: the version, and one object per option."""
    options = [
        {"section": group.name, **encode(option), "expected": option.expected}
        for group in groups
        for option in group.options
    ]
    return {"onnxruntime": version, "options": options}


def build_options_table(group: OptionGroup, version: str) -> Table:
    """Returns the table of a group."""
    table = Table(title=f"{group.title}, ONNX Runtime {version}", box=box.SIMPLE_HEAD, leading=1)
    # Names have up to 63 characters: with a column of their own they would leave no room on a terminal of
    # 100. So an option's texts share two columns, and the second leaves the first as much as a name takes.
    table.add_column("option, effect", max_width=_EFFECT_WIDTH, overflow="fold")
    table.add_column("values, default, since", width=_VALUES_WIDTH, overflow="fold")
    for option in group.options:
        table.add_row(_describe(option), _describe_values(option))
    return table


def _describe(option: Option) -> Text:
    text = Text.assemble((option.name, "bold"), f"\n{option.effect}" if option.effect else "")
    return text if option.owner is None else text.append(f"\nNot to be set: {option.owner}.", "italic")


def _describe_values(option: Option) -> Text:
    if not option.effect:  # reserved
        return Text()
    since = f"{option.since} or earlier" if option.since == OLDEST else option.since
    return Text(f"{option.expected}\ndefault {option.default}\nsince {since}")


@command
def options(
    name: Annotated[str, typer.Argument(metavar="NAME", help="List only names that contain this text.")] = "",
    provider: Annotated[OptionOwner | None, typer.Option(help="List only these.")] = None,
    onnxruntime: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version of ONNX Runtime; by default the installed one."),
    ] = None,
    json: AsJson = False,
) -> Output:
    """List the options of ONNX Runtime: values, default, effect and first version."""
    version = onnxruntime or installed_onnxruntime() or NEWEST
    groups = list_options(version, provider, part=name)
    for remark in describe_version(version):
        echo(remark)
    if not groups:
        echo(f"no option has {name!r} in its name")
    return Output(encode_groups(version, groups), [build_options_table(group, version) for group in groups])
