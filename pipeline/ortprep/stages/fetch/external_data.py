"""Weights outside the model file: where they may lie, and which files those are.

A model names its external data by paths relative to its own folder. What leads elsewhere is refused, as ONNX
Runtime itself refuses it at load, but here with the file's name and before anything is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.errors import SourceError
from ortprep.transport.time_limit import check_time
from ortprep.transport.transfer import MAX_BYTES


def check_location(location: str, *, model: str) -> str:
    """Returns an external data location as a plain relative path.

    Raises:
        SourceError: The path is absolute, climbs out, has characters that nobody can print, or is no path. A
            star begins what ONNX Runtime takes for an address in memory.
    """
    pure = PurePosixPath(location)
    is_odd = not location.isprintable() or any(character in location for character in "\\*")
    if is_odd or pure.is_absolute() or ".." in pure.parts or not pure.parts or len(location) > 1024:
        raise SourceError(
            f"external data outside the model's folder: {location[:200]!r} in {model}\n"
            "  expected a relative path below the folder",
            hint="save the model again with its external data beside it",
        )
    return str(pure)


def find_beside(model: Path, location: str) -> Path:
    """Returns the external data file of a local model.

    Raises:
        SourceError: There is no such file, or a link leads out of the model's folder.
    """
    folder = model.parent.resolve()
    path = (folder / location).resolve()
    if not path.is_relative_to(folder):
        raise SourceError(
            f"external data outside the model's folder: {location!r} in {model}\n"
            f"  expected below {folder}, got a link to {path}",
            hint="put the file itself into the folder, if you know that it belongs to the model",
        )
    if not path.is_file():
        raise SourceError(
            f"external data missing: {location!r} of {model}\n  expected a file, got none at {path}"
        )
    return path


def digest_beside(model: Path, cache: DigestCache) -> Mapping[str, str]:
    """Returns the digest of every external data file of a local model, by location.

    What cannot be fetched has words in place of its digest; fetching it will say what is wrong. Raises what
    `check_time` raises.
    """
    digests = {}
    try:
        skeleton = read_skeleton(model, between_reads=check_time)
        locations = external_locations(skeleton, between_reads=check_time)
    except WireError:
        return {}
    for location in locations:
        try:
            file = find_beside(model, check_location(location, model=str(model)))
            digests[location] = "too large" if file.stat().st_size > MAX_BYTES else cache.digest(file)
        except (SourceError, OSError):
            digests[location] = "unreadable"
    return digests
