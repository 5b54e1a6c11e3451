"""Versions of ONNX Runtime: the installed one, and their order by number."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextlib import suppress

_GPU_WHEEL = "onnxruntime-gpu"
_DISTRIBUTIONS = (_GPU_WHEEL, "onnxruntime")

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
def _installed() -> Mapping[str, str]:
    """Returns the version of every installed distribution of ONNX Runtime, by name."""
    # Imported here: a job that loads from a folder has no use for it, and it takes milliseconds.
    from importlib import metadata

    found = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def installed_onnxruntime() -> str | None:
    """Returns the version of the installed ONNX Runtime without importing it, None if there is none."""
    return next(iter(_installed().values()), None)


def hint_to_install(*extras: str) -> str:
    """Returns the command that installs extras of ortprep, and ONNX Runtime where it is missing or broken.

    Its two wheels own the same files, so the one that is not installed is never proposed beside the other.

    Args:
        extras: `build`, say; `cuda`, which needs the GPU wheel; none where ONNX Runtime cannot be imported.
    """
    wheels = _installed()
    if not wheels:
        return _pip(*(extras if "cuda" in extras else (*extras, "gpu")))
    if len(wheels) > 1 or ("cuda" in extras and _GPU_WHEEL not in wheels):
        return f"pip uninstall -y {' '.join(wheels)} && {_pip(*extras or ('gpu',))}"
    if extras:
        return _pip(*extras)
    ((name, version),) = wheels.items()
    return f"pip install --force-reinstall --no-deps {name}=={version}"


def _pip(*extras: str) -> str:
    return f'pip install "ortprep[{",".join(extras)}]"'
