"""What a bundle may set for a session: how it is made and run, nothing else.

Options of ONNX Runtime can write files, read others than the bundle's own, load libraries and call
addresses. None of that is needed to serve a model, so a bundle sets only what the table of options knows and
leaves to users (F18 of docs/format.md). A build makes its sessions of plans of its own and
is free to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from ortprep.bundle.loader_config import FirstPhase, Variant
from ortprep.runtime.loading.session import CPU, CUDA, import_onnxruntime

_MAX_PROBLEMS = 20
_OPTIMIZERS, _DEVICE = "optimization.disable_specified_optimizers", "device_id"
_WRITTEN_BY_BUILDS = {_OPTIMIZERS: r"[A-Za-z0-9_]+(;[A-Za-z0-9_]+)*", _DEVICE: r"[0-9]{1,9}"}
"""What builds write into bundles though users do not set it by name, and what its values look like."""


def find_invalid_options(variant: Variant) -> tuple[str, ...]:
    """Returns what a variant or its first phase sets and must not, one phrase each, the first 20 at most.

    That is every option the table keeps from users, every value it does not accept, and every option it does
    not know, unless the installed ONNX Runtime is newer than the table and the value cannot name a file:
    ONNX Runtime takes most invalid values silently, but some end the whole process (a word where `mlas.…`
    entries expect a number aborts, measured on 1.31.1), which no caller of `load` could catch.
    """
    problems = (problem for plan in _plans(variant) for problem in _problems(plan))
    return tuple(dict.fromkeys(islice(problems, _MAX_PROBLEMS)))


def find_unlisted_options(variant: Variant) -> tuple[str, ...]:
    """Returns the options that only an ONNX Runtime newer than the table can know."""
    options: dict[str, None] = {}
    for plan in _plans(variant):
        providers = ((provider.name, provider.options) for provider in plan.providers)
        for provider, names in ((None, plan.session_options.config_entries), *providers):
            if names:
                from ortprep.options import find_unlisted

                version = import_onnxruntime().__version__
                options |= dict.fromkeys(find_unlisted(names, provider=provider, version=version))
    return tuple(options)


def _plans(variant: Variant) -> tuple[Variant | FirstPhase, ...]:
    return (variant,) if variant.first_phase is None else (variant, variant.first_phase)


def _problems(plan: Variant | FirstPhase) -> Iterator[str]:
    options = plan.session_options
    for provider in plan.providers:
        if provider.name not in (CPU, CUDA):
            yield f"the execution provider {provider.name[:80]}, where {CPU} or {CUDA} is expected"
    if options.attributes or options.config_entries or any(provider.options for provider in plan.providers):
        from ortprep.options import (
            NEWEST,
            check_attributes,
            check_provider_options,
            check_session_config,
            version_parts,
        )

        # Which of the listed versions has an option is the affair of the variant's requirements.
        version = max(NEWEST, import_onnxruntime().__version__, key=version_parts)
        yield from check_attributes(options.attributes, version=version)
        yield from check_session_config(_without(_OPTIMIZERS, options.config_entries), version=version)
        for provider in plan.providers:
            chosen = _without(_DEVICE, provider.options)
            yield from check_provider_options(provider.name, chosen, version=version)


def _without(name: str, chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns options without the one that builds write, if that has a value as they write it."""
    is_sound = name in chosen and re.fullmatch(_WRITTEN_BY_BUILDS[name], chosen[name]) is not None
    return {key: value for key, value in chosen.items() if not (is_sound and key == name)}
