"""The files of a variant on their way into a session: read ahead, compared with their records."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.digest import DigestCache, digest_file
from ortprep.bundle.file_memory import Stamp, find_stamp
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, Variant, golden_of
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.bundle.paths import is_safe_path, resolve_inside
from ortprep.bundle.verification import (
    FileDifference,
    compare_bundle,
    compare_files,
    compare_kinds,
    raise_differences,
)
from ortprep.errors import IntegrityError
from ortprep.runtime.loading.load_options import NO_DEADLINE, Deadline
from ortprep.runtime.machine.page_cache import start_prefetch

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import LoadOptions

_ORT_FORMAT = slice(4, 8), b"ORTM"
"""Where ONNX Runtime's own format says what it is; it knows no external data in a file of another name."""


def list_opened(config: LoaderConfig, variant: Variant, options: LoadOptions) -> tuple[FileEntry, ...]:
    """Returns the records of the files that are read for a session of a variant."""
    golden = (golden_of(config, variant).file,) if options.check == "golden" else ()
    return tuple(dict.fromkeys((*variant.files, *golden)))


def check_files(
    root: Path,
    config: LoaderConfig,
    variant: Variant,
    options: LoadOptions,
    signed: tuple[FileEntry, ...] | None = None,
) -> tuple[tuple[str, Stamp], ...]:
    """Has the files of a variant read ahead, and compares them with their records as the policy says.

    With full digests they are the bundle's others: the variant's own are hashed whenever a session is made.
    Returns path and stamp of every file, as named and free of links, as it was before it was looked at.

    Args:
        root: The bundle's folder.
        config: The content of its `loader.json`.
        variant: The variant that was selected.
        options: Digest policy, checks and deadline of the load.
        signed: The files that were signed, which are all there may be; None where no signature is required.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: A path leaves the bundle, its two records contradict each other, a file is not as it
            was recorded, or a model refers to data that the variant does not list.
        LoadTimeoutError: The deadline passed.
    """
    entries = list_opened(config, variant, options)
    paths = tuple(resolve_inside(root, entry.path) for entry in entries)
    # As they are named too, so that a link that is led elsewhere shows.
    named = (root / entry.path for entry in entries)
    stamps = tuple((str(path), find_stamp(path)) for path in dict.fromkeys((*paths, *named)))
    start_prefetch(paths)
    if options.digests == "full":
        if options.whole_bundle:
            _check_others(root, entries, options.deadline, signed)
        return stamps
    if options.digests == "off":
        # The disk is trusted with the bytes, but ONNX Runtime would wait for the writer of a FIFO for ever.
        differences: Iterable[FileDifference] = compare_kinds(root, entries)
    else:
        cache = DigestCache(between_blocks=options.deadline.remaining_s)
        differences = compare_files(root, entries, cache.digest)
    raise_differences(root, tuple(differences))
    check_external_data(root, variant, options.deadline)
    return stamps


def _check_others(
    root: Path, opened: tuple[FileEntry, ...], deadline: Deadline, signed: tuple[FileEntry, ...] | None
) -> None:
    """Compares all files of a bundle but those that are opened, and looks for added ones."""
    hasher = functools.partial(digest_file, between_blocks=deadline.remaining_s)
    raise_differences(root, compare_bundle(root, hasher, but=frozenset(opened), entries=signed))


def check_external_data(root: Path, variant: Variant, deadline: Deadline = NO_DEADLINE) -> None:
    """Raises unless all data that the model of a variant refers to is in files that it lists.

    ONNX Runtime reads whatever file a graph names, before 1.24 outside the model's folder too, and takes
    some names for addresses in memory.

    Raises:
        IntegrityError: The model refers to something else, or cannot be read.
        LoadTimeoutError: The deadline passed.
    """
    listed = {resolve_inside(root, entry.path) for entry in variant.files}
    model = resolve_inside(root, variant.model)
    for location in _locations(model, deadline):
        # A star begins what ONNX Runtime takes for an address. It looks beside the file that it opens.
        # `Path.resolve` would fail on links that lead in a circle.
        is_sound = is_safe_path(location) and "*" not in location
        if not is_sound or Path(os.path.realpath(model.parent / location)) not in listed:
            raise IntegrityError(
                f"model refers to data that its bundle does not list: {root / variant.model}\n"
                f"  expected one of the files of variant {variant.name!r}, got {location[:200]!r}"
            )


def _locations(model: Path, deadline: Deadline) -> tuple[str, ...]:
    try:
        with model.open("rb") as file:
            head = file.read(8)
        where, magic = _ORT_FORMAT
        if model.suffix == ".ort" and head[where] == magic:
            return ()
        return external_locations(read_skeleton(model, between_reads=deadline.remaining_s))
    except (OSError, WireError) as error:
        raise IntegrityError(f"not an ONNX model: {model}\n  {error}") from error
