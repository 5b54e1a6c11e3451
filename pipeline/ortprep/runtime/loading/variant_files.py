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
from ortprep.bundle.file_memory import find_stamp, open_regular, read_digest
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


class FileCheck:
    """A comparison of the files of a variant with their records, as the policy says.

    Large files are compared in threads, from now on. With full digests none of the variant's own is: they are
    hashed whenever a session is made.

    Attributes:
        stamps: Path and stamp of every file, as named and free of links, as it was before it was looked at.

    Args:
        root: The bundle's folder.
        config: The content of its `loader.json`.
        variant: The variant.
        options: Digest policy, checks and deadline of the load.

    Raises:
        IntegrityError: A path leaves the bundle.
    """

    def __init__(self, root: str, config: LoaderConfig, variant: Variant, options: LoadOptions) -> None:
        self._root, self._variant, self._options = root, variant, options
        self._entries = list_opened(config, variant, options)
        paths = tuple(resolve_inside(root, entry.path) for entry in self._entries)
        # As they are named too, so that a link that is led elsewhere shows.
        named = (f"{root}/{entry.path}" for entry in self._entries)
        self.stamps = tuple((path, find_stamp(path)) for path in dict.fromkeys((*paths, *named)))
        self._is_cancelled = False
        # One core is left to the thread that makes the session.
        threads, self._cache = usable_cores() - 1, None
        if options.digests == "changed":
            self._cache = DigestCache(threads=threads, between_blocks=self._go_on)
        self._large = () if self._cache is None else self._find_large(self._cache)
        # Whatever ends the thread early, files count as compared only where it says so.
        self._error: Exception | None = IntegrityError(f"files were not compared: {root}")
        self._running = _thread.allocate_lock()  # `threading` would take a millisecond to import
        self._running.acquire()
        if not self._large:
            self._compare_large()
            return
        try:
            _thread.start_new_thread(self._compare_large, ())
        except RuntimeError:  # no more threads
            self._compare_large()

    def _find_large(self, cache: DigestCache) -> tuple[FileEntry, ...]:
        """Returns the files that are hashed later; none whose digest is known, as after a pull."""
        return tuple(
            entry
            for entry in self._entries
            if entry.size_bytes > _LARGE_BYTES
            and read_digest(find_stamp(f"{self._root}/{entry.path}"), cache.folder) != entry.sha256
        )

    def _compare_large(self) -> None:
        try:
            if self._cache is not None:
                digests = self._cache.digest, self._cache.digest_blocks
                self._raise(compare_files(self._root, self._large, *digests))
            self._error = None
        except Exception as error:  # noqa: BLE001 - raised where the comparison is waited for
            self._error = error
        finally:
            self._running.release()

    def compare_others(self, signed: tuple[FileEntry, ...] | None) -> None:
        """Compares the other files, and looks at the model's references; large files meanwhile.

        Args:
            signed: The files that were signed, which are all there may be; None where none need be.

        Raises:
            BundleError: The bundle cannot be read.
            IntegrityError: The bundle's two records contradict each other, a file is not as it was recorded,
                or a model refers to data that the variant does not list.
            LoadTimeoutError: The deadline passed.
        """
        options = self._options
        if options.digests == "full":
            _check_others(self._root, self._entries, options.deadline, signed)
            return
        if self._cache is None:
            # The disk is trusted with the bytes; but ONNX Runtime would wait for ever for a FIFO's writer.
            self._raise(compare_kinds(self._root, self._entries))
        else:
            others = tuple(entry for entry in self._entries if entry not in self._large)
            self._raise(compare_files(self._root, others, self._cache.digest))
        check_external_data(self._root, self._variant, options.deadline)

    def wait(self) -> None:
        """Waits for the comparison of the large files, and takes part in it.

        Raises:
            IntegrityError: A file is not as it was recorded.
            LoadTimeoutError: The deadline passed.
        """
        if self._cache is not None:
            self._cache.help()
        with self._running:
            if self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Ends the comparison soon: nobody waits for it."""
        self._is_cancelled = True

    def __enter__(self) -> None:
        """Makes a session meanwhile, in the block."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the end; what `wait` raises says more than an error of a damaged file's session."""
        if kind is None or issubclass(kind, Exception):
            self.wait()
        else:  # an interrupt
            self.cancel()

    def _go_on(self) -> None:
        if self._is_cancelled:
            raise IntegrityError(f"files were not compared: {self._root}")
        self._options.deadline.remaining_s()

    def _raise(self, differences: Iterable[FileDifference]) -> None:
        raise_differences(self._root, tuple(differences))


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
