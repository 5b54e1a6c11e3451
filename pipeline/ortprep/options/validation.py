"""Options that a version knows, and problems of those a user chose.

ONNX Runtime accepts unknown session config keys and most invalid values silently, and a few invalid values
abort the whole process (measured on 1.31.1: `mlas.kleidiai.conv_igemm_max_work`,
`mlas.nchwc_pointwise_conv_max_input_channel_batch`). So everything is checked before a session is made.

A version newer than the tables may know more. An option that they lack is refused all the same: its value
could name a file or an address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ortprep.errors import nearest_choice
from ortprep.options.option import NEWEST, Option, Table, format_option, read_tables, version_parts
from ortprep.versions import upgrade_command

Scalar = str | int | float | bool

CUDA = "CUDAExecutionProvider"

MAX_PROBLEMS = 20
"""Most problems that a check lists: a suggestion takes milliseconds, and a file may have many options."""


def known_options(table: str, version: str) -> tuple[Option, ...]:
    """Returns the options that a version of ONNX Runtime has, by name; raises as `version_parts`.

    Args:
        table: `session` for session config entries, `attribute` for plain attributes of
            `onnxruntime.SessionOptions`, else an execution provider; of others than CUDA none are known.
        version: The version.
    """
    listed = sorted(read_tables().get(table, {}).items())
    return tuple(option for _, option in listed if option.exists_in(version))


def check_options(table: str, chosen: Mapping[str, Scalar], *, version: str) -> tuple[str, ...]:
    """Returns what is wrong with options, one sentence each, up to `MAX_PROBLEMS`; `table` as above."""
    noun = {"session": "session config key", "attribute": "session option"}.get(table, f"{table} option")
    return tuple(_problems(noun, read_tables().get(table, {}), chosen, version=version))


def _problems(noun: str, table: Table, chosen: Mapping[str, Scalar], *, version: str) -> Iterator[str]:
    """Yields what is wrong with the chosen options of one place, at most `MAX_PROBLEMS`."""
    version_parts(version)  # a bad version is refused even when nothing was chosen
    count = 0
    for name, value in chosen.items():
        option = table.get(name)
        if option is None:
            problem: str | None = _unknown(name, table, version=version)
        else:
            problem = _misused(option, format_option(value), version=version)
        if problem is not None:
            yield f"{noun} {_shorten(name)} {problem}"
            count += 1
            if count == MAX_PROBLEMS:
                return


def _misused(option: Option, text: str, *, version: str) -> str | None:
    if option.owner is not None:
        return f"must not be set: {option.owner}"
    if not option.exists_in(version):
        return f"came with ONNX Runtime {option.since}; this is {version}"
    if not option.accepts(text):
        return f"has a bad value: expected {option.expected}, got {_shorten(text)}"
    return None


def _unknown(name: str, table: Table, *, version: str) -> str:
    advice = _suggest(name, table, version=version)
    if version_parts(version) <= version_parts(NEWEST):
        return f"is unknown to ONNX Runtime {version}; {advice or 'docs/options.md lists the options'}"
    return (
        f"is unknown to every ONNX Runtime up to {NEWEST}, the last one listed here; this is {version}; "
        f"{advice or f'if that has it, upgrade ortprep: {upgrade_command()}'}"
    )


def _suggest(name: str, table: Table, *, version: str) -> str | None:
    settable = [name for name, one in table.items() if one.owner is None and one.exists_in(version)]
    nearest = nearest_choice(name.strip().lower(), settable)
    return None if nearest is None else f"did you mean {nearest!r}?"


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}… ({len(text)} characters)"
