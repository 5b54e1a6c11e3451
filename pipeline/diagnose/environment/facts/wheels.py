"""Installed distributions of ONNX Runtime, read without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from ortprep.diagnose.environment.facts.records import Wheel

_NAMES = re.compile(r"(onnxruntime|ort)([-_.][a-z0-9-_.]+)?", re.IGNORECASE)
_OWNED = "onnxruntime/__init__.py"
_KNOWN = frozenset(
    f"onnxruntime{suffix}"
    for suffix in ("", "-gpu", "-openvino", "-directml", "-rocm", "-migraphx", "-qnn", "-training")
)


def read_wheels(path: Sequence[str] | None = None) -> tuple[Wheel, ...]:
    """Returns every installed distribution that owns the import package `onnxruntime`, first found first.

    Others begin with the same word and own packages of their own, as `onnxruntime-extensions`.

    Args:
        path: Folders to look in; those Python imports from if None.
    """
    return tuple(dict.fromkeys(_find(path or sys.path)))


def name_installed(wheels: Sequence[Wheel]) -> str | None:
    """Returns the one distribution that is imported; None if there is none or several own its files."""
    names = {wheel.name for wheel in wheels if wheel.location == wheels[0].location}
    return names.pop() if len(names) == 1 else None


def read_requirements(name: str) -> tuple[str, ...]:
    """Returns what an installed distribution requires, extras included; nothing if it is not installed."""
    try:
        return tuple(metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return ()


def _find(path: Sequence[str]) -> Iterator[Wheel]:
    context = metadata.DistributionFinder.Context(path=list(path))
    # Not `metadata.distributions`, which asks finders that packages put in Python's place, as the backport
    # importlib_metadata does where it is imported: those leave out files that are not there.
    for distribution in metadata.MetadataPathFinder.find_distributions(context):
        name = _name_of(distribution)
        if _NAMES.fullmatch(name) and _owns_package(distribution, name):
            yield Wheel(_normalise(name), distribution.version, str(distribution.locate_file("")))


def _name_of(distribution: metadata.Distribution) -> str:
    try:
        return distribution.metadata["Name"] or ""
    except FileNotFoundError:
        return ""  # a folder left half deleted


def _owns_package(distribution: metadata.Distribution, name: str) -> bool:
    files = distribution.files
    if files is None:  # conda and distributions of Linux keep no list
        return _normalise(name) in _KNOWN
    return any(file.as_posix() == _OWNED for file in files)


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
