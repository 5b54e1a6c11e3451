"""What a bundle may ask of a session: to be made and run, nothing beyond.

Options of ONNX Runtime can write files, read others than the bundle's own, load libraries and call
addresses. None of that is needed to serve a model, so a bundle sets only what the table of options knows and
leaves to users (F18 of docs/format.md). A build makes its sessions of plans of its own and
is free to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ortprep.bundle.loader_config import FirstPhase, Variant
from ortprep.bundle.session_record import ProviderRecord
from ortprep.runtime.loading.session import CPU, CUDA, import_onnxruntime

if TYPE_CHECKING:
    from ortprep.options import Option

_OF_THE_BUILD = {
    "optimization.disable_specified_optimizers": r"[A-Za-z0-9_]+(;[A-Za-z0-9_]+)*",
    "device_id": r"[0-9]{1,9}",
}
"""What builds write into bundles though users do not set it by name, and what its values look like."""


def find_invalid_options(variant: Variant) -> tuple[str, ...]:
    """Returns everything that a variant or its first phase sets and must not, one phrase each.

    That is every option the table keeps from users, every value it does not accept, and every option it does
    not know, unless the installed ONNX Runtime is newer than the table and the value cannot name a file:
    ONNX Runtime takes most invalid values silently, but some end the whole process (a word where `mlas.…`
    entries expect a number aborts, measured on 1.31.1), which no caller of `load` could catch.
    """
    plans = (variant,) if variant.first_phase is None else (variant, variant.first_phase)
    return tuple(dict.fromkeys(problem for plan in plans for problem in _problems(plan)))


def find_unlisted_options(variant: Variant) -> tuple[str, ...]:
    """Returns the options that only an ONNX Runtime newer than the table can know."""
    plans = (variant,) if variant.first_phase is None else (variant, variant.first_phase)
    found: list[str] = []
    for plan in plans:
        found += _unlisted(plan.session_options.config_entries)
        for provider in plan.providers:
            found += _unlisted(provider.options, provider.name)
    return tuple(dict.fromkeys(found))


def _unlisted(names: Collection[str], provider: str | None = None) -> tuple[str, ...]:
    if not names:
        return ()
    from ortprep.options import find_unlisted

    return find_unlisted(names, provider=provider, version=import_onnxruntime().__version__)


def _problems(plan: Variant | FirstPhase) -> Iterator[str]:
    options = plan.session_options
    for provider in plan.providers:
        if provider.name not in (CPU, CUDA):
            yield f"the execution provider {provider.name[:80]}, where {CPU} or {CUDA} is expected"
    if options.attributes or options.config_entries or any(provider.options for provider in plan.providers):
        from ortprep.options import NEWEST, known_attributes, known_session_config

        yield from _misfits(options.attributes, known_attributes(NEWEST), ())
        entries = options.config_entries
        yield from _misfits(entries, known_session_config(NEWEST), _unlisted(entries))
        for provider in plan.providers:
            yield from _provider_problems(provider)


def _provider_problems(provider: ProviderRecord) -> Iterator[str]:
    from ortprep.options import NEWEST, known_provider_options

    table = known_provider_options(provider.name, NEWEST)
    for problem in _misfits(provider.options, table, _unlisted(provider.options, provider.name)):
        yield f"{provider.name}.{problem}"


def _misfits(
    chosen: Mapping[str, str | int | bool], table: Iterable[Option], unlisted: Collection[str]
) -> Iterator[str]:
    from ortprep.options import format_option, is_harmless

    known = {option.name: option for option in table}
    for name, value in chosen.items():
        option, text = known.get(name), format_option(value)
        shown = f"{name[:80] if name.isprintable() else ascii(name[:80])}={text[:80]!r}"
        if option is None and name in unlisted:
            if not is_harmless(text):
                yield f"{shown}, where a number, on, off or auto is expected"
        elif option is None:
            yield f"{shown}, which no version of ONNX Runtime listed here knows"
        elif name in _OF_THE_BUILD:
            if re.fullmatch(_OF_THE_BUILD[name], text) is None:
                yield f"{shown}, where other text is expected"
        elif option.owner is not None:
            yield f"{shown}, which is not a bundle's to set"
        elif not option.accepts(text):
            yield f"{shown}, where {option.expected} is expected"
