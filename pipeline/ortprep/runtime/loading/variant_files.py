"""The files of a variant on their way into a session: compared with their records, beside its making.

Files whose digests are not remembered are hashed in a thread while the session is made, which is then not
given out before they are found to be as recorded.
"""

from __future__ import annotations

import _thread
import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortprep.bundle.digest import DigestCache, digest_file
from ortprep.bundle.file_memory import Stamp, find_stamp, open_regular
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, Variant, golden_of
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
from ortprep.runtime.machine.processor import usable_cores

if TYPE_CHECKING:
    from ortprep.bundle.file_memory import StrPath
    from ortprep.runtime.loading.load_options import LoadOptions

_LARGE_BYTES = 128 * 1024
"""Files up to this size are hashed sooner than a thread starts and loads OpenSSL."""

_SEARCHED_BYTES = 1024 * 1024
"""Models up to this size are searched for references to other files sooner than their parser is imported."""

_ORT_HEAD_BYTES = 8
_ORT_FORMAT = slice(4, 8), b"ORTM"
"""Where ONNX Runtime's own format says what it is; it knows no external data in a file of another name."""


def list_opened(config: LoaderConfig, variant: Variant, options: LoadOptions) -> tuple[FileEntry, ...]:
    """Returns the records of the files that are read for a session of a variant."""
    golden = (golden_of(config, variant).file,) if options.check == "golden" else ()
    return tuple(dict.fromkeys((*variant.files, *golden)))


def check_files(
    root: str,
    config: LoaderConfig,
    variant: Variant,
    options: LoadOptions,
    signed: tuple[FileEntry, ...] | None = None,
) -> tuple[tuple[tuple[str, Stamp], ...], Comparison | None]:
    """Compares the files of a variant with their records as the policy says.

    With full digests they are the bundle's others: the variant's own are hashed whenever a session is made.
    Returns path and stamp of every file, as named and free of links, as it was before it was looked at; and
    what is still being compared.

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
    named = (f"{root}/{entry.path}" for entry in entries)
    stamps = tuple((path, find_stamp(path)) for path in dict.fromkeys((*paths, *named)))
    if options.digests == "full":
        _check_others(root, entries, options.deadline, signed)
        return stamps, None
    comparison = None
    if options.digests == "off":
        # The disk is trusted with the bytes; but ONNX Runtime would wait for ever for a FIFO's writer.
        differences: Iterable[FileDifference] = compare_kinds(root, entries)
    else:
        # One core is left to the thread that makes the session.
        cache = DigestCache(threads=usable_cores() - 1, between_blocks=options.deadline.remaining_s)
        # Those whose digests are known, as after a pull, need no thread.
        large = [one for one in zip(paths, entries, strict=True) if one[1].size_bytes > _LARGE_BYTES]
        later = tuple(one for path, one in large if cache.recall(path) != one.sha256)
        if later:
            comparison = Comparison(root, later, cache)
        differences = compare_files(root, tuple(one for one in entries if one not in later), cache.digest)
    raise_differences(root, tuple(differences))
    check_external_data(root, variant, options.deadline)
    return stamps, comparison


class Comparison:
    """A comparison of large files with their records, in threads of its own.

    As a context manager it waits for its end, and takes part in it, after what the block does meanwhile.
    """

    def __init__(self, root: str, entries: tuple[FileEntry, ...], cache: DigestCache) -> None:
        self._root, self._entries, self._cache = root, entries, cache
        # Whatever ends the thread early, files count as compared only where it says so.
        self._error: Exception | None = IntegrityError(f"files were not compared: {root}")
        self._running = _thread.allocate_lock()  # `threading` would take a millisecond to import
        self._running.acquire()
        try:
            _thread.start_new_thread(self._compare, ())
        except RuntimeError:  # no more threads
            self._compare()

    def _compare(self) -> None:
        try:
            digests = self._cache.digest, self._cache.digest_blocks
            raise_differences(self._root, compare_files(self._root, self._entries, *digests))
            self._error = None
        except Exception as error:  # noqa: BLE001 - raised where the comparison is waited for
            self._error = error
        finally:
            self._running.release()

    def __enter__(self) -> None:
        """The block may end, in an error too, before the comparison does."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits, unless the block was interrupted.

        Raises:
            IntegrityError: A file is not as it was recorded, which says more than the error of a session.
            LoadTimeoutError: The deadline passed.
        """
        if kind is not None and not issubclass(kind, Exception):
            return
        self._cache.take_part()
        with self._running:
            if self._error is not None:
                raise self._error


def _check_others(
    root: str, opened: tuple[FileEntry, ...], deadline: Deadline, signed: tuple[FileEntry, ...] | None
) -> None:
    """Compares all files of a bundle but those that are opened, and looks for added ones."""
    hasher = functools.partial(digest_file, between_blocks=deadline.remaining_s)
    from pathlib import Path

    raise_differences(root, compare_bundle(Path(root), hasher, but=frozenset(opened), entries=signed))


def check_external_data(root: StrPath, variant: Variant, deadline: Deadline = NO_DEADLINE) -> None:
    """Raises unless all data that the model of a variant refers to is in files that it lists.

    ONNX Runtime reads whatever file a graph names, before 1.24 outside the model's folder too, and takes
    some names for addresses in memory.

    Raises:
        IntegrityError: The model refers to something else, or cannot be read.
        LoadTimeoutError: The deadline passed.
    """
    root = os.fspath(root)
    named = {f"{root}/{entry.path}": resolve_inside(root, entry.path) for entry in variant.files}
    model = resolve_inside(root, variant.model)
    for location in _locations(model, deadline):
        # A star begins what ONNX Runtime takes for an address. It looks beside the file that it opens.
        is_sound = is_safe_path(location) and "*" not in location
        place = f"{os.path.dirname(model)}/{location}"
        found = os.path.realpath(place)
        # A link on the way that nothing watches could be led elsewhere later.
        if not is_sound or found not in named.values() or (place != found and place not in named):
            raise IntegrityError(
                f"model refers to data that its bundle does not list: {root}/{variant.model}\n"
                f"  expected one of the files of variant {variant.name!r}, got {location[:200]!r}"
            )


def _locations(model: str, deadline: Deadline) -> tuple[str, ...]:
    """Returns the names of the files that a model takes its weights from."""
    try:
        with open_regular(model) as file:
            is_large = os.fstat(file.fileno()).st_size > _SEARCHED_BYTES
            head = file.read(_ORT_HEAD_BYTES if is_large else _SEARCHED_BYTES)
        where, magic = _ORT_FORMAT
        if model.endswith(".ort") and head[where] == magic:
            return ()
        if not is_large and b"location" not in head:  # the key of every reference
            return ()
        from ortprep.bundle.onnx_wire import external_locations, read_skeleton

        check = deadline.remaining_s
        return external_locations(read_skeleton(model, between_reads=check), between_reads=check)
    except (OSError, ValueError) as error:  # among them `WireError`
        raise IntegrityError(f"not an ONNX model: {model}\n  {error}") from error
