"""A spec's real inputs: which files they are, whether their arrays fit the model, and their part of keys."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.model_facts import ModelInterface
from ortprep.errors import BundleError, SourceError
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec

# Finding the files is part of every no-op build, reading them is not: what reads arrays is imported where it
# is needed.


MAX_SAMPLE_BYTES = 8 * 2**30
"""Largest size of a spec's samples, all together: as files, and as arrays, which are written uncompressed."""


_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})
"""Errors of a path that is no folder to look into; others, such as of a name that is too long, are raised."""


def find_sample_files(spec: ModelSpec) -> tuple[Path, ...]:
    """Returns the files that the spec's `samples` glob matches, sorted; none if it has no glob."""
    if spec.samples is None:
        return ()
    folder, _, pattern = spec.samples.rpartition("/")
    try:
        found = [path for path in (spec.folder / folder).iterdir() if fnmatchcase(path.name, pattern)]
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return ()
        raise
    paths = sorted(path for path in found if path.is_file())
    files = {(status.st_dev, status.st_ino): path for path in reversed(paths) if (status := path.stat())}
    return tuple(sorted(files.values()))


def _digests(spec: ModelSpec, files: tuple[Path, ...]) -> list[list[str]]:
    """Returns name and digest of each sample; raises `SourceError` if they are too large together."""
    digest, size_bytes = DigestCache().digest, sum(path.stat().st_size for path in files)
    if size_bytes > MAX_SAMPLE_BYTES:
        raise SourceError(
            f"too large: the samples of {spec.name}\n"
            f"  expected at most {MAX_SAMPLE_BYTES} bytes, got {size_bytes} in {len(files)} files",
            hint="set samples in the spec to a pattern that matches fewer files",
        )
    return [[path.relative_to(spec.folder).as_posix(), digest(path)] for path in files]


def inputs_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what a spec declares of inputs, as JSON types."""
    return {name: declared.model_dump(mode="json") for name, declared in spec.inputs.items()}


def samples_key(spec: ModelSpec) -> list[list[str]] | None:
    """Returns name and digest of every sample, in order, None for a spec that asks for none.

    Names are relative to the spec's folder, so that they are the same from wherever the build is started.

    Raises:
        SourceError: One cannot be read, they are too large, or the glob names what no file can be called.
    """
    if spec.samples is None:
        return None
    try:
        return _digests(spec, find_sample_files(spec))
    except OSError as error:
        raise SourceError(
            f"cannot read the samples of {spec.name}: {error.filename or spec.samples}\n  {error.strerror}",
            hint=f"set samples in the spec of {quoted(spec.name)}; "
            f"it is relative to {quoted(spec.folder.resolve())}",
        ) from error


def check_sample_files(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields every way in which the sample files contradict the model, going by their headers alone."""
    files = find_sample_files(spec)
    if spec.samples is not None and not files:
        yield f"samples: expected .npz files, got none for {spec.samples!r} in {spec.folder}"
    yield from (f"samples: {problem}" for path in files for problem in _header_problems(path, interface))


def _header_problems(path: Path, interface: ModelInterface) -> Iterator[str]:
    """Yields every way in which a sample contradicts the model, going by its headers alone."""
    from ortprep.runtime.tensors.arrays import read_headers
    from ortprep.runtime.tensors.element_types import dtype_name

    try:
        headers = read_headers(path)
    except BundleError as error:
        yield " ".join(error.message.split())
        return
    for item in interface.inputs:
        if item.name not in headers:
            yield f"{path}: expected an array {item.name!r}, got {', '.join(headers) or 'none'}"
            continue
        dtype, shape = dtype_name(headers[item.name][0]), headers[item.name][1]
        if dtype != item.dtype or not item.fits(shape):
            expected = item.dtype if item.shape is None else f"{item.dtype} {list(item.shape)}"
            yield f"{path}: array {item.name!r}: expected {expected}, got {dtype} {list(shape)}"
