"""Files of which every byte is hashed in this process, before a session is made of them.

Files that this user and root alone can change are hashed where they are. Others are hashed while they are
copied to a folder of this user's, and the session is made of the copies: a user who may write to a file, or
has mapped it before, can change it after any check, also while a session maps it. The copies are removed once
the session exists; ONNX Runtime keeps what it has mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import signal
from collections.abc import Iterator
from pathlib import Path

from ortprep.bundle.digest import PREFIX, digest_blocks, digest_file
from ortprep.bundle.file_memory import (
    StrPath,
    is_protected,
    new_sha256,
    open_regular,
    require_cache_folder,
)
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, Variant
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.bundle.verification import compare_files, raise_differences
from ortprep.errors import DISK_ERRORS, LoadError, hint_of_os_error
from ortprep.runtime.loading.load_options import Deadline, LoadOptions
from ortprep.runtime.loading.variant_files import check_external_data, list_opened
from ortprep.runtime.machine.processor import usable_cores

_BLOCK_BYTES = 1024 * 1024


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
    entries = list_opened(config, variant, options)
    are_copies = not all(_is_out_of_reach(root / entry.path) for entry in entries)
    copies = (
        scratch_folder("", require_cache_folder("copies")) if are_copies else contextlib.nullcontext(root)
    )
    with copies as folder:
        _hash_files(root, folder if are_copies else None, entries, options.deadline)
        check_external_data(folder, variant, options.deadline)
        yield folder


def _hash_files(root: Path, copies: Path | None, entries: tuple[FileEntry, ...], deadline: Deadline) -> None:
    """Compares files with their records, byte for byte; or their copies, which it makes."""
    if copies is None:
        hash_all = functools.partial(digest_file, between_blocks=deadline.remaining_s)
        hash_blocks = functools.partial(
            digest_blocks, threads=usable_cores(), between_blocks=deadline.remaining_s
        )
        raise_differences(root, compare_files(root, entries, hash_all, hash_blocks))
        return
    for entry in entries:
        place, size_bytes = copies / entry.path, entry.size_bytes
        copy = functools.partial(_copy, destination=place, size_bytes=size_bytes, deadline=deadline)
        raise_differences(root, compare_files(root, (entry,), copy))


def _copy(source: StrPath, destination: Path, size_bytes: int, deadline: Deadline) -> str:
    """Copies at most so many bytes, and returns their digest: of what was written, not of what was read."""
    hasher, block = new_sha256(size_bytes), memoryview(bytearray(_BLOCK_BYTES))
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
    return f"{PREFIX}{hasher.hexdigest()}"


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
    with open_regular(path) as file:
        try:
            # A process that opens it for writing right now has this one sent SIGIO, which would end it.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return False
