"""Versions of ONNX Runtime: the installed one, and their order by number."""

from __future__ import annotations

import functools
import re

_DISTRIBUTIONS = ("onnxruntime-gpu", "onnxruntime")

# Bounded, so that a hostile file cannot ask for numbers of thousands of digits.
_NUMBERS = re.compile(r"[0-9]{1,9}+(?![0-9])(?:\.[0-9]{1,9}+(?![0-9])){0,9}")


def parse_version(text: str) -> tuple[int, ...] | None:
    """Returns the numeric parts of a version without trailing zeros, or None for what is no version.

    Reading stops at the first thing that is neither digit nor dot: `1.31.0.dev2+cpu` is (1, 31).
    """
    found = _NUMBERS.match(text)
    if found is None:
        return None
    parts = [int(part) for part in found[0].split(".")]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


@functools.cache
def installed_onnxruntime() -> str | None:
    """Returns the version of the installed ONNX Runtime without importing it, None if there is none."""
    # Imported here: a job that loads from a folder has no use for it, and it takes milliseconds.
    from importlib import metadata

    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
