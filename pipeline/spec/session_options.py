"""Checks a spec's session and provider options against what the installed ONNX Runtime knows.

ONNX Runtime itself accepts unknown session config keys and junk values silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.options import CUDA, Scalar, check_provider_options, check_session_config
from pipeline.spec.problems import Place


def find_option_problems(runtime: object, *, version: str) -> Iterator[tuple[Place, str]]:
    """Yields what is wrong with the options of a spec's `runtime` section, with the place of each.

    Args:
        runtime: The section's data, perhaps not valid in other ways; those are not told here.
        version: ONNX Runtime version.
    """
    for key, value in _scalars(runtime, "session_config"):
        for problem in check_session_config({key: value}, version=version):
            yield ("runtime", "session_config", key), problem
    for key, value in _scalars(runtime, "cuda"):
        for problem in check_provider_options(CUDA, {key: value}, version=version):
            yield ("runtime", "cuda", key), problem


def _scalars(runtime: object, section: str) -> Iterator[tuple[str, Scalar]]:
    entries: Any = runtime.get(section) if isinstance(runtime, Mapping) else None
    if isinstance(entries, Mapping):
        yield from ((key, value) for key, value in entries.items() if isinstance(value, Scalar))
