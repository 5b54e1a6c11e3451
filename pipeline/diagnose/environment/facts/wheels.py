"""Installed distributions of ONNX Runtime, read without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from ortprep.diagnose.environment.facts.records import Wheel

_NAMES = re.compile(r"(onnxruntime|ort)([-_.][a-z0-9-_.]+)?", re.IGNORECASE)
_OWNED = "onnxruntime/__init__.py"


def read_wheels() -> tuple[Wheel, ...]:
    """Returns every installed distribution that owns the import package `onnxruntime`, first found first.

    Others begin with the same word and own packages of their own, as `onnxruntime-extensions`.
    """
    return tuple(dict.fromkeys(_find()))


def _find() -> Iterator[Wheel]:
    # Not `metadata.distributions`, which asks finders that packages put in Python's place, as the backport
    # importlib_metadata does where it is imported: those leave out files that are not there.
    context = metadata.DistributionFinder.Context(path=sys.path)
    for distribution in metadata.MetadataPathFinder.find_distributions(context):
        try:
            name = distribution.metadata["Name"] or ""
        except FileNotFoundError:
            continue  # a folder left half deleted
        files = distribution.files
        # Conda and distributions of Linux keep no list of files.
        owns = name == "onnxruntime" if files is None else any(str(file) == _OWNED for file in files)
        if _NAMES.fullmatch(name) and owns:
            yield Wheel(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
