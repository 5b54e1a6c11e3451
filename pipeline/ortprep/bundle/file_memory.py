"""Facts about files, remembered between processes: small entries in the user's cache folder, found by inode.

A memory is an optimisation only: where it cannot be read or written, what it would say is computed again.
Every user of the cache folder gets its part of it from `cache_folder` or `require_cache_folder`, which refuse
what another user, root aside, could change. This module imports next to nothing, since the quickest load goes
through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from typing import Any, BinaryIO

CACHE_VARIABLE = "ORTPREP_CACHE_DIR"
"""Environment variable that names the folder of memories."""

_CACHE_HINT = f"export {CACHE_VARIABLE}=DIR   (a folder of your own)"

StrPath = str | os.PathLike[str]

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, modification and change time of a file: equal as long as it is neither replaced nor
written to. The change time is part of it because no program can set it back, as it can the other."""

DIGEST_FOLDER = "digests"
"""Where digests are remembered, below the cache folder."""

DIGEST_PREFIX = "sha256:"

_HEX = frozenset("0123456789abcdef")
_MAX_LINKS = 40
_MAX_DIGEST_BYTES = 256
_SMALL_BYTES = 256 * 1024
_CLOCK_TICK_NS = 20_000_000
"""File systems stamp changes with a coarse clock: a file that changed just now may do so again unseen."""

_SECOND_NS = 1_000_000_000
"""What stamps are multiples of where they are whole seconds, as on ext4 of small inodes; FAT's are even."""


def read_stamp(file: StrPath | int) -> Stamp:
    """Reads the stamp of a file, given by its path, following links, or as an open descriptor.

    Raises:
        OSError: There is no such file.
    """
    s = os.stat(file)
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def find_stamp(file: StrPath) -> Stamp:
    """Returns the stamp of a file; one that no file has where there is none."""
    try:
        return read_stamp(file)
    except OSError:
        return (0, 0, 0, 0, 0)


def is_settled(stamp: Stamp, at_ns: int | None = None) -> bool:
    """Returns whether a file would have shown, by its stamp, that it was written to since a moment.

    Args:
        stamp: The stamp, read at that moment or later.
        at_ns: The moment, as `time.time_ns` gives it; None for now.
    """
    tick_ns = _CLOCK_TICK_NS if stamp[4] % _SECOND_NS else 2 * _SECOND_NS + _CLOCK_TICK_NS
    return (time.time_ns() if at_ns is None else at_ns) - stamp[4] > tick_ns


def is_protected(path: str, *, make: bool = False, for_own_files: bool = False) -> bool:
    """Returns whether this user and root alone can change what a path leads to.

    The file, every folder above it and every link on the way belong to one of the two, and nobody else may
    write to them. A folder above may be sticky, as `/tmp` is: others cannot move what is not theirs there.
    A group may write if this user alone is in it and there is no access control list: with `umask 002`, the
    default where each user has a group (Ubuntu), all that a user makes is like that.

    Args:
        path: A file or a folder.
        make: Whether to make missing folders, for this user alone.
        for_own_files: Whether the path may be a sticky folder, too: what this user puts there is protected.

    Raises:
        OSError: Something on the way is missing, cannot be looked at, or cannot be made.
    """
    owners, found, links = (os.geteuid(), 0), "", 0
    absolute = path if path.startswith("/") else f"{os.getcwd()}/{path}"
    pending = absolute.split("/")[::-1]
    while pending:
        name = pending.pop()
        if name == "..":  # as the system takes it: what was found so far has no links
            found, name = found.rpartition("/")[0], "."
        here = f"{found}/{name}" if name not in ("", ".") else found or "/"
        status = _look_at(here, make=make)
        if status.st_uid not in owners:
            return False
        if stat.S_ISLNK(status.st_mode):
            target, links = os.readlink(here), links + 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            found = "" if target.startswith("/") else found
            pending += target.split("/")[::-1]
            continue
        if pending and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
        is_sticky = bool(status.st_mode & stat.S_ISVTX) and (bool(pending) or for_own_files)
        if status.st_mode & 0o022 and not is_sticky and not _is_own_alone(here, status):
            return False
        found = here if here != "/" else ""
    return True


def _is_own_alone(path: str, status: os.stat_result) -> bool:
    """Returns whether what a group may write to is this user's alone: the rule of Debian's OpenSSH.

    The group's bits of a mode are the most that an access control list gives (acl(5)), so there must be none.
    """
    import grp
    import pwd

    try:
        has_list = any("acl" in name for name in os.listxattr(path, follow_symlinks=False))
        own, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except (OSError, KeyError):  # a file system without attributes, or a user or group without name
        return False
    if status.st_mode & 0o002 or has_list:
        return False
    if group.gr_name != own.pw_name or group.gr_gid != own.pw_gid:
        return False
    others = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group.gr_gid}.union(group.gr_mem)
    return others == {own.pw_name}


def _look_at(path: str, *, make: bool) -> os.stat_result:
    """Returns the status of a path, links not followed; may make a missing folder first."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # somebody made it meanwhile; whose it is shows now
        os.mkdir(path, 0o700)
    return os.lstat(path)


def _cache_path(name: str) -> str:
    """Returns a folder in `$ORTPREP_CACHE_DIR`, else in `ortprep` in the user's XDG cache folder.

    For a user without home, as containers have them, it is no folder and cannot become one.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return f"{named}/{name}"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # which the standard says to ignore
        caches = os.path.expanduser("~/.cache")
    return f"{caches if os.path.isabs(caches) else os.devnull}/ortprep/{name}"


_WARNED: set[str] = set()


def cache_folder(name: str) -> str | None:
    """Returns a folder of the cache, made if need be; None if there is none that can be trusted.

    If others could change what is in it, that is logged at WARNING, once per folder and process.
    """
    folder = _cache_path(name)
    try:
        if _is_private_folder(folder):
            return folder
    except OSError:
        return None
    if folder not in _WARNED:
        _WARNED.add(folder)
        import logging

        logging.getLogger(__name__).warning("going on without the cache: %s", _explain_unsafe(folder))
    return None


def require_cache_folder(name: str) -> str:
    """Returns a folder of the cache, made if need be; raises as `require_private_folder`."""
    return require_private_folder(_cache_path(name))


def require_private_folder(folder: str, *, hint: str = _CACHE_HINT) -> str:
    """Returns a folder, made if need be, whose files this user and root alone can change.

    Args:
        folder: The folder.
        hint: How to choose another one.

    Raises:
        CacheError: Others could change them, or it cannot be made.
    """
    try:
        if _is_private_folder(folder):
            return folder
        failure = _explain_unsafe(folder)
    except OSError as error:
        failure = f"cannot use the cache: {folder}\n  {error.strerror or error}"
    from ortprep.errors import CacheError

    raise CacheError(failure, hint=hint)


def _is_private_folder(folder: str) -> bool:
    return is_protected(folder, make=True) and stat.S_ISDIR(os.lstat(folder).st_mode)


def _explain_unsafe(folder: str) -> str:
    return (
        f"cache is not safe to use: {folder}\n"
        "  expected a folder, no link, that neither it nor a folder above it lets other users write to"
    )


def entry_path(folder: str | None, stamp: Stamp, suffix: str = "") -> str | None:
    """Returns the path of the entry of a file, in one of 256 subfolders; None where there is no folder."""
    return None if folder is None else f"{folder}/{stamp[1] % 256:02x}/{stamp[0]:x}-{stamp[1]:x}{suffix}"


def read_entry(path: str | None, *, max_bytes: int) -> bytes | None:
    """Returns the content of an entry; None if there is none, it is longer, or another user may write it.

    Such an entry can only be from before the cache folder was made safe. Where there is no folder of entries,
    `path` is None.
    """
    if path is None:
        return None
    try:
        # A link could lead to another file of the user's; a FIFO would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            return None
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            return None
        return os.read(handle, max_bytes)
    except OSError:
        return None
    finally:
        os.close(handle)


def write_entry(path: str | None, content: bytes) -> None:
    """Writes an entry, so that readers see the old content or the new, never a part; none if `path` is None.

    Raises:
        OSError: The folder is read-only or full; an old entry is then untouched.
    """
    if path is None:
        return
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    temporary = f"{folder}/.tmp-{os.urandom(8).hex()}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:  # an interrupt, too, must leave no temporary file
        with contextlib.suppress(FileNotFoundError):  # it came after the rename
            os.unlink(temporary)
        raise


def read_digest(stamp: Stamp, folder: str | None, kind: str = "") -> str | None:
    """Returns the digest of a file, `sha256:<hex>`, that a folder has for its stamp; None if it has none.

    A file has one of each `kind`, which is part of the entry's name.
    """
    content = read_entry(entry_path(folder, stamp, kind), max_bytes=_MAX_DIGEST_BYTES) or b""
    *stamped, digest = content.decode("ascii", errors="replace").split() or [""]
    return digest if stamped == [str(value) for value in stamp[2:]] and is_digest(digest) else None


def write_digest(stamp: Stamp, digest: str, folder: str | None, kind: str = "") -> None:
    """Has `read_digest` return a digest; raises as `write_entry`."""
    fields = (*stamp[2:], digest)  # the rest of the stamp is in the entry's name
    write_entry(entry_path(folder, stamp, kind), " ".join(map(str, fields)).encode())


def digest_bytes(data: bytes) -> str:
    """Returns the digest of `data` as `sha256:<hex>`."""
    hasher = new_sha256(len(data))
    hasher.update(data)
    return f"{DIGEST_PREFIX}{hasher.hexdigest()}"


def new_sha256(size_bytes: int) -> Any:
    """Returns a SHA-256 for so many bytes: OpenSSL's takes as long to load as Python's own for 500 kB."""
    own = "_sha2" if sys.version_info >= (3, 12) else "_sha256"
    for name in (own, "hashlib") if size_bytes <= _SMALL_BYTES else ("hashlib",):
        with contextlib.suppress(ImportError):
            return getattr(__import__(name), "sha256")()  # noqa: B009 - mypy does not know the first two
    raise ImportError("no SHA-256")


def is_digest(text: str) -> bool:
    """Returns whether `text` is `sha256:` and 64 lower-case hexadecimal digits."""
    return len(text) == 71 and text.startswith(DIGEST_PREFIX) and set(text[7:]) <= _HEX


def open_regular(path: StrPath, flags: int = 0) -> BinaryIO:
    """Opens a file for reading, and nothing else: a FIFO would make its reader wait for ever.

    `flags` are further ones of `os.open`.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    # Without waiting for a writer, should it be a FIFO; regular files know no difference.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")
