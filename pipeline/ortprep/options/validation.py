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

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_RUN_CONFIG = frozenset(
    {"memory.enable_memory_arena_shrinkage", "disable_synchronize_execution_providers", "gpu_graph_id"}
)

MAX_PROBLEMS = 20
"""Most problems that a check lists: a suggestion takes milliseconds, and a file may have many options."""


def known_session_config(version: str) -> tuple[Option, ...]:
    """Returns the session config entries of an ONNX Runtime version, by name; raises as `version_parts`."""
    return _known(read_tables()["session"], version)


def known_provider_options(provider: str, version: str) -> tuple[Option, ...]:
    """Returns a provider's options in a version, by name; none for a provider not known here."""
    return _known(_of_provider(provider) or {}, version)


def known_attributes(version: str) -> tuple[Option, ...]:
    """Returns the plain attributes of `onnxruntime.SessionOptions` in a version, by name."""
    return _known(read_tables()["attribute"], version)


def check_session_config(entries: Mapping[str, Scalar], *, version: str) -> tuple[str, ...]:
    """Returns what is wrong with session config entries, one sentence each, up to `MAX_PROBLEMS`."""
    return tuple(_problems("session config key", read_tables()["session"], entries, version=version))


def check_provider_options(provider: str, options: Mapping[str, Scalar], *, version: str) -> tuple[str, ...]:
    """Returns what is wrong with a provider's options, one sentence each, up to `MAX_PROBLEMS`."""
    table = _of_provider(provider)
    if table is None:
        return (f"options of {provider} are not known; expected one of {CPU}, {CUDA}",)
    return tuple(_problems(f"{provider} option", table, options, version=version))


def check_attributes(attributes: Mapping[str, Scalar], *, version: str) -> tuple[str, ...]:
    """Returns what is wrong with plain session options, one sentence each, up to `MAX_PROBLEMS`."""
    return tuple(_problems("session option", read_tables()["attribute"], attributes, version=version))


def _of_provider(provider: str) -> Table | None:
    """Returns a provider's options, none for the CPU's; None for a provider not known here."""
    return {CPU: {}, CUDA: read_tables()["cuda"]}.get(provider)


def _known(table: Table, version: str) -> tuple[Option, ...]:
    return tuple(option for _, option in sorted(table.items()) if option.exists_in(version))


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
    advice = _find_elsewhere(name, table) or _suggest(name, table, version=version)
    if version_parts(version) <= version_parts(NEWEST):
        return f"is unknown to ONNX Runtime {version}; {advice or 'docs/options.md lists the options'}"
    return (
        f"is unknown to every ONNX Runtime up to {NEWEST}, the last one listed here; this is {version}; "
        f"{advice or f'if that has it, upgrade ortprep: {upgrade_command()}'}"
    )


def _find_elsewhere(name: str, table: Table) -> str | None:
    """Returns where an option belongs that is unknown in one place."""
    if name in _RUN_CONFIG:
        return "it is an entry of RunOptions, given with each run"
    homes = (
        ("a session config key", read_tables()["session"]),
        ("a plain session option", read_tables()["attribute"]),
        (f"an option of {CUDA}", read_tables()["cuda"]),
    )
    return next((f"it is {noun}" for noun, home in homes if home is not table and name in home), None)


def _suggest(name: str, table: Table, *, version: str) -> str | None:
    settable = [option.name for option in _known(table, version) if option.owner is None]
    nearest = nearest_choice(name.strip().lower(), settable)
    return None if nearest is None else f"did you mean {nearest!r}?"


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text)} characters)"
