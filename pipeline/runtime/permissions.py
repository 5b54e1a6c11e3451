"""What a bundle may ask of a session: to be made and run, nothing beyond.

Options of ONNX Runtime can write files, read others than the bundle's own, load libraries and call
addresses. None of that is needed to serve a model, so a bundle that asks for it is refused, whoever wrote it
(F18 of docs/format.md). A build makes its sessions of plans of its own and is free to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pipeline.bundle.loader_config import FirstPhase, ProviderRecord, Variant
from pipeline.runtime.session import CPU, CUDA, WRITING_ATTRIBUTES

if TYPE_CHECKING:
    from pipeline.options import Option

_NAMES_A_FILE = re.compile(r"(?:^|[._])(?:file|filepath|path|folder|dir|directory|library)(?:$|[._])")
_WRITING_ENTRIES = frozenset({"ep.context_enable", "session.debug_layout_transformation"})
_ADDRESS_OPTIONS = re.compile(r"gpu_external_.*|.*user_compute_stream")


def find_forbidden(variant: Variant) -> tuple[str, ...]:
    """Returns every option of a variant or its first phase that a bundle must not set, by name.

    Session config entries are judged by their names, so that those of later ONNX Runtime versions are too.
    Options of providers other than CPU and CUDA are all refused: several name libraries, which are loaded.
    """
    return tuple(name for way in _ways(variant) for name in _forbidden(way))


def find_junk(variant: Variant) -> tuple[str, ...]:
    """Returns every session option and config entry, of either phase, whose value is known to be a wrong one.

    ONNX Runtime accepts most junk without a word, but some of it ends the whole process (a word where
    `mlas.…` entries expect a number aborts, measured on 1.31.1), which no caller of `load` could catch, and
    100,000 threads take minutes to start.
    """
    ways = [way.session_options for way in _ways(variant)]
    attributes = [item for options in ways for item in options.attributes.items()]
    entries = [item for options in ways for item in options.config_entries.items()]
    if not attributes and not entries:
        return ()
    from pipeline.options import NEWEST, known_attributes, known_session_config

    return (
        *_misfits(attributes, known_attributes(NEWEST)),
        *_misfits(entries, known_session_config(NEWEST)),
    )


def _misfits(chosen: Iterable[tuple[str, str | int | bool]], table: Iterable[Option]) -> Iterator[str]:
    from pipeline.options import format_option

    known = {option.name: option for option in table}
    for name, value in chosen:
        if name in known and not known[name].accepts(format_option(value)):
            yield f"{name}={value!r} where {known[name].expected} is expected"


def _ways(variant: Variant) -> tuple[Variant | FirstPhase, ...]:
    return (variant,) if variant.first_phase is None else (variant, variant.first_phase)


def _forbidden(way: Variant | FirstPhase) -> Iterator[str]:
    options = way.session_options
    yield from sorted(WRITING_ATTRIBUTES & options.attributes.keys())
    yield from (key for key in options.config_entries if key in _WRITING_ENTRIES or _NAMES_A_FILE.search(key))
    yield from (name for provider in way.providers for name in _forbidden_options(provider))


def _forbidden_options(provider: ProviderRecord) -> Iterator[str]:
    for name in provider.options:
        if provider.name not in (CPU, CUDA) or _ADDRESS_OPTIONS.fullmatch(name):
            yield f"{provider.name}.{name}"
