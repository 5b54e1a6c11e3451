"""The files of a variant on their way into a session: read ahead, compared with their records.

Large files whose digests are not remembered are hashed beside the making of the session, which is then not
given out before they are found to be as recorded.

Where nothing remembered counts, they are hashed in this process. Files that this user and root alone can
change are hashed where they are. Others are hashed while they are copied to a folder of this user's, and the
session is made of the copies: a user who may write to a file, or has mapped it before, can change it after
any check, also while a session maps it. The copies are removed once the session exists; ONNX Runtime keeps
what it has mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.digest import PREFIX, DigestCache, digest_file
from ortprep.bundle.file_memory import Stamp, find_stamp, is_protected, open_regular, require_cache_folder
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, Variant, golden_of
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.bundle.paths import is_safe_path, resolve_inside
from ortprep.bundle.verification import (
    Digester,
    FileDifference,
    compare_bundle,
    compare_file,
    compare_files,
    compare_kinds,
    raise_differences,
)
from ortprep.errors import DISK_ERRORS, IntegrityError, LoadError, hint_of_os_error
from ortprep.runtime.loading.load_options import NO_DEADLINE, Deadline
from ortprep.runtime.machine.memory import start_prefetch

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import LoadOptions

_BLOCK_BYTES = 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
"""Files up to this size are hashed sooner than a thread pays that does it."""

_ABANDONED_S = 60.0
_ORT_FORMAT = slice(4, 8), b"ORTM"
"""Where ONNX Runtime's own format says what it is; it knows no external data in a file of another name."""


def _list_opened(config: LoaderConfig, variant: Variant, options: LoadOptions) -> tuple[FileEntry, ...]:
    """Returns the records of the files that are read for a session of a variant."""
    golden = (golden_of(config, variant).file,) if options.check == "golden" else ()
    return tuple(dict.fromkeys((*variant.files, *golden)))


def check_files(
    root: Path,
    config: LoaderConfig,
    variant: Variant,
    options: LoadOptions,
    signed: tuple[FileEntry, ...] | None = None,
) -> tuple[tuple[tuple[str, Stamp], ...], Comparison | None]:
    """Has the files of a variant read ahead, and compares them with their records as the policy says.

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
    entries = _list_opened(config, variant, options)
    paths = tuple(resolve_inside(root, entry.path) for entry in entries)
    # As they are named too, so that a link that is led elsewhere shows.
    named = (root / entry.path for entry in entries)
    stamps = tuple((str(path), find_stamp(path)) for path in dict.fromkeys((*paths, *named)))
    start_prefetch(paths)
    if options.digests == "full":
        if options.whole_bundle:
            _check_others(root, entries, options.deadline, signed)
        return stamps, None
    later: tuple[FileEntry, ...] = ()
    if options.digests == "off":
        # The disk is trusted with the bytes, but ONNX Runtime would wait for the writer of a FIFO for ever.
        differences: Iterable[FileDifference] = compare_kinds(root, entries)
    else:
        hasher = DigestCache(between_blocks=options.deadline.remaining_s).digest
        later = tuple(entry for entry in entries if entry.size_bytes > _LARGE_BYTES)
        differences = compare_files(root, tuple(entry for entry in entries if entry not in later), hasher)
    raise_differences(root, tuple(differences))
    check_external_data(root, variant, options.deadline)
    return stamps, Comparison(root, later, hasher) if later else None


class Comparison:
    """A comparison of large files with their records, in a thread of its own."""

    def __init__(self, root: Path, entries: tuple[FileEntry, ...], digest: Digester) -> None:
        self._root, self._entries, self._digest = root, entries, digest
        # Whatever ends the thread early, files count as compared only where it says so.
        self._error: Exception | None = IntegrityError(f"files were not compared: {root}")
        self._thread = threading.Thread(target=self._compare, name="ortprep-digests", daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        try:
            raise_differences(self._root, compare_files(self._root, self._entries, self._digest))
            self._error = None
        except Exception as error:  # noqa: BLE001 - raised where the comparison is waited for
            self._error = error

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            IntegrityError: A file is not as it was recorded.
            LoadTimeoutError: The deadline passed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


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
    named = {root / entry.path: resolve_inside(root, entry.path) for entry in variant.files}
    model = resolve_inside(root, variant.model)
    for location in _locations(model, deadline):
        # A star begins what ONNX Runtime takes for an address. It looks beside the file that it opens.
        # `Path.resolve` would fail on links that lead in a circle.
        is_sound = is_safe_path(location) and "*" not in location
        place = model.parent / location
        found = Path(os.path.realpath(place))
        # A link on the way that nothing watches could be led elsewhere later.
        if not is_sound or found not in named.values() or (place != found and place not in named):
            raise IntegrityError(
                f"model refers to data that its bundle does not list: {root / variant.model}\n"
                f"  expected one of the files of variant {variant.name!r}, got {location[:200]!r}"
            )


def _locations(model: Path, deadline: Deadline) -> tuple[str, ...]:
    """Returns the names of the files that a model takes its weights from."""
    try:
        with model.open("rb") as file:
            head = file.read(8)
        where, magic = _ORT_FORMAT
        if model.suffix == ".ort" and head[where] == magic:
            return ()
        check = deadline.remaining_s
        return external_locations(read_skeleton(model, between_reads=check), between_reads=check)
    except (OSError, WireError) as error:
        raise IntegrityError(f"not an ONNX model: {model}\n  {error}") from error


@contextlib.contextmanager
def verified_files(
    root: Path, config: LoaderConfig, variant: Variant, options: LoadOptions
) -> Iterator[Path]:
    """Yields the folder of files of which a session is made, every byte of which was hashed in this process.

    That is the bundle's folder, or one with copies, which nobody else can change. It is removed afterwards.

    Raises:
        IntegrityError: A file is not as it was recorded, or a model refers to data that is not listed.
        LoadError: There is no space for copies.
        LoadTimeoutError: The deadline passed.
        CacheError: The files have to be copied, and the cache folder cannot be used.
    """
    entries = _list_opened(config, variant, options)
    are_copies = not all(_is_out_of_reach(root / entry.path) for entry in entries)
    with _private_folder() if are_copies else contextlib.nullcontext(root) as folder:
        _hash_files(root, folder if are_copies else None, entries, options.deadline)
        check_external_data(folder, variant, options.deadline)
        yield folder


def _hash_files(root: Path, copies: Path | None, entries: tuple[FileEntry, ...], deadline: Deadline) -> None:
    def hash_file(entry: FileEntry, path: Path) -> str:
        if copies is None:
            return digest_file(path, between_blocks=deadline.remaining_s)
        return _copy(path, copies / entry.path, entry.size_bytes, deadline)

    differences = [compare_file(root, entry, functools.partial(hash_file, entry)) for entry in entries]
    raise_differences(root, tuple(difference for difference in differences if difference is not None))


def _copy(source: Path, destination: Path, size_bytes: int, deadline: Deadline) -> str:
    """Copies at most so many bytes, and returns their digest: of what was written, not of what was read."""
    hasher, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    destination.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with open_regular(source) as file, destination.open("xb") as copy:
            while count := file.readinto(block[:size_bytes]):  # type: ignore[attr-defined]
                hasher.update(block[:count])
                copy.write(block[:count])
                size_bytes -= count
                deadline.remaining_s()
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise LoadError(
            f"cannot copy {source}, which others may write to\n"
            f"  expected space in {destination.parent}: {error.strerror}",
            hint=hint_of_os_error(error, str(destination.parent)),
        ) from error
    return PREFIX + hasher.hexdigest()


def _is_out_of_reach(path: Path) -> bool:
    """Returns whether nobody but this user and root can change a file, now or through what is open."""
    try:
        return is_protected(str(path)) and not _has_writer(path)
    except OSError:
        return False  # reading it will say what is wrong


def _has_writer(path: Path) -> bool:
    """Returns whether any process has a file open for writing, as far as the system says.

    A read lease is refused then (fcntl(2), F_SETLEASE): with EAGAIN, also by a network file system that
    cannot tell. The file of another user, root, or a file system without leases says nothing.
    """
    import signal  # costs milliseconds

    with open_regular(path) as file:
        try:
            # A process that opens it for writing right now has this one sent SIGIO, which would end it.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return False


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Yields a new folder of this user's in the cache folder, locked as long as it is used."""
    import shutil  # costs milliseconds

    copies = Path(require_cache_folder("copies"))
    _remove_abandoned(copies)
    folder = copies / os.urandom(8).hex()
    try:
        folder.mkdir(mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(handle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(copies: Path) -> None:
    """Removes what processes left that were killed: nobody has it locked."""
    import shutil

    for folder in copies.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _ABANDONED_S:
                continue  # it may not be locked yet
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
