"""Installed distributions of ONNX Runtime, read without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from ortprep.doctor.environment.facts.records import Wheel

_NAMES = re.compile(r"(onnxruntime|ort)([-_.][a-z0-9-_.]+)?", re.IGNORECASE)
_OWNED = "onnxruntime/__init__.py"


def read_wheels() -> tuple[Wheel, ...]:
    """Returns the distributions that own the import package `onnxruntime`, where Python finds it first.

    Others begin with the same word and own packages of their own, as `onnxruntime-extensions`.
    """
    found = list(_find())
    return tuple(dict.fromkeys(wheel for folder, wheel in found if folder == found[0][0]))


def _find() -> Iterator[tuple[str, Wheel]]:
    # Not `metadata.distributions`, which asks finders that packages put in Python's place, as the backport
    # importlib_metadata does where it is imported: those leave out files that are not there.
    context = metadata.DistributionFinder.Context(path=sys.path)
    for distribution in metadata.MetadataPathFinder.find_distributions(context):
        try:
            name = distribution.metadata["Name"] or ""
        except FileNotFoundError:
            continue  # a folder left half deleted
        if _NAMES.fullmatch(name) and _owns_package(distribution, name):
            normalised = re.sub(r"[-_.]+", "-", name).lower()
            yield str(distribution.locate_file("")), Wheel(normalised, distribution.version)


def _owns_package(distribution: metadata.Distribution, name: str) -> bool:
    files = distribution.files
    if files is None:  # conda and distributions of Linux keep no list
        return name == "onnxruntime"
    return any(str(file) == _OWNED for file in files)
