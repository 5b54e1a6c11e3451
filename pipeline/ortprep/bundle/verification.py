"""Is a bundle, byte for byte, the one that was written? Answers with a difference, not with yes or no."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ortprep.bundle import LOADER_FILE, REQUIREMENTS_FILE
from ortprep.bundle.digest import BLOCK_BYTES, DigestCache, digest_file
from ortprep.bundle.file_memory import StrPath
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, listed_files, read_loader_config
from ortprep.bundle.paths import RECEIPT_FILES, is_model_path, resolve_inside, walk_folders
from ortprep.errors import BundleError, IntegrityError
from ortprep.quoting import quoted

if TYPE_CHECKING:
    from pathlib import Path

Digester = Callable[[StrPath], str]

_AT_THE_TOP = frozenset({LOADER_FILE, REQUIREMENTS_FILE, "golden.npz"})


class FileDifference(NamedTuple):
    """A file that is not as recorded.

    Attributes:
        path: The file, relative to the bundle.
        kind: `missing`, `added`, `size`, `content`, `kind` (not a regular file) or `unreadable`.
        expected: The recorded value.
        got: The value found.
    """

    path: str
    kind: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: expected {self.expected}, got {self.got}"


def describe_files(folder: Path, *, with_blocks: bool = True) -> tuple[FileEntry, ...]:
    """Returns the record of every file below `folder`, in order of path; as `describe_file`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    return tuple(describe_file(*file, with_blocks=with_blocks) for file in zip(files, names, strict=True))


def describe_file(path: Path, name: str, *, with_blocks: bool = True) -> FileEntry:
    """Returns the record of a file under a name, with the digest of its blocks if a load is to compare it.

    Raises:
        OSError: It cannot be read.
    """
    cache, size_bytes = DigestCache(), path.stat().st_size
    blocks = cache.digest_blocks(path) if with_blocks and size_bytes > BLOCK_BYTES else ""
    return FileEntry(name, size_bytes, cache.digest(path), blocks)


def compare_files(
    root: StrPath,
    entries: tuple[FileEntry, ...],
    digest: Digester = digest_file,
    digest_blocks: Digester | None = None,
) -> tuple[FileDifference, ...]:
    """Compares files with their records and returns every difference, in order.

    Args:
        root: The bundle's folder.
        entries: The records.
        digest: Returns the digest of a file; a cache's, for one.
        digest_blocks: Returns that of its blocks, which is compared instead where a record has it.

    Raises:
        IntegrityError: A path leaves the bundle.
    """
    differences = (_compare_file(root, entry, digest, digest_blocks) for entry in entries)
    return tuple(difference for difference in differences if difference is not None)


def _compare_file(
    root: StrPath, entry: FileEntry, digest: Digester, digest_blocks: Digester | None
) -> FileDifference | None:
    """Compares one file with its record; as `compare_files`."""
    path = resolve_inside(root, entry.path)
    hash_file, expected = digest, entry.sha256
    if digest_blocks is not None and entry.blocks:
        hash_file, expected = digest_blocks, entry.blocks
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return FileDifference(entry.path, "kind", "a regular file", "something else")
        if status.st_size != entry.size_bytes:
            return FileDifference(entry.path, "size", f"{entry.size_bytes} bytes", f"{status.st_size} bytes")
        actual = hash_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return FileDifference(entry.path, "missing", f"{entry.size_bytes} bytes", "no such file")
    except OSError as error:
        return FileDifference(
            entry.path, "unreadable", "a file that can be read", error.strerror or str(error)
        )
    return None if actual == expected else FileDifference(entry.path, "content", expected, actual)


def compare_kinds(root: StrPath, entries: tuple[FileEntry, ...]) -> tuple[FileDifference, ...]:
    """Returns what is there and no regular file, in order; looks at no byte. As `compare_file`."""
    paths = {entry.path: resolve_inside(root, entry.path) for entry in entries}
    return tuple(
        FileDifference(name, "kind", "a regular file", "something else")
        for name, path in paths.items()
        if os.path.exists(path) and not os.path.isfile(path)
    )


def compare_bundle(
    root: Path,
    digest: Digester = digest_file,
    *,
    but: frozenset[FileEntry] = frozenset(),
    entries: tuple[FileEntry, ...] | None = None,
) -> tuple[FileDifference, ...]:
    """Compares a whole bundle with its manifest, files that should not be there included.

    Args:
        root: The bundle's folder.
        digest: Function that hashes a file.
        but: Files that are compared elsewhere.
        entries: The files that there should be, the manifest among them; None for those that it lists.

    Raises:
        BundleError: The manifest, the loader config or a folder cannot be read.
        IntegrityError: One of them was changed or leads out of the bundle, or they contradict each other.
    """
    # Imported here: a job that checks single files needs none of the manifest's types.
    from ortprep.bundle.manifest import MANIFEST_FILE, read_manifest

    resolve_inside(root, MANIFEST_FILE)
    manifest = read_manifest(root)
    config = read_loader_config(root)
    stray = set(listed_files(config)) - set(manifest.files)
    if stray:
        names = ", ".join(sorted(entry.path for entry in stray))
        raise IntegrityError(f"loader.json and manifest.json disagree in {root}\n  about {names}")
    if foreign := ", ".join(sorted(_find_foreign(config, manifest.files))):
        raise IntegrityError(
            f"files that no bundle has in {root}\n  expected none but its own, got {foreign}"
        )
    added = sorted(find_added(root, (entry.path for entry in manifest.files)))
    extra = (FileDifference(path, "added", "no such file", "a file") for path in added)
    expected = manifest.files if entries is None else entries
    compared = tuple(entry for entry in expected if entry not in but)
    return (*compare_files(root, compared, digest), *extra)


def _find_foreign(config: LoaderConfig, files: Iterable[FileEntry]) -> Iterator[str]:
    """Yields the paths of files that no bundle has: a stranger's must not bring a spec or a program."""
    from pathlib import PurePosixPath

    listed = {entry.path for entry in listed_files(config)}
    folders = {variant.name for variant in config.variants}
    for path in (PurePosixPath(entry.path) for entry in files):
        is_weights = str(path) in listed and path.parts[0] in folders and len(path.parts) > 1
        if str(path) not in _AT_THE_TOP and not (is_weights and is_model_path(str(path))):
            yield str(path)


def find_added(root: Path, listed: Iterable[str]) -> set[str]:
    """Returns the files below a bundle's folder whose paths are neither listed nor a registry's receipt.

    Links that lead to folders are among them.

    Raises:
        BundleError: A folder cannot be read.
    """
    from ortprep.bundle.manifest import MANIFEST_FILE

    paths: set[str] = set()
    for folder, subfolders, files in walk_folders(root, _refuse_unreadable):
        links = [name for name in subfolders if os.path.islink(f"{folder}/{name}")]
        paths.update(os.path.relpath(f"{folder}/{name}", root) for name in (*files, *links))
    return paths - RECEIPT_FILES - {*listed} - {MANIFEST_FILE}


def check_bundle(root: Path, digest: Digester = digest_file) -> None:
    """Raises unless the bundle is exactly what was written.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs; the message lists every difference.
    """
    name = os.path.basename(os.path.realpath(root))
    hint = f"ortprep prepare {quoted(name)}  (or copy the bundle again, if it is a copy)"
    raise_differences(root, compare_bundle(root, digest), hint=hint)


def describe_loss(folder: Path) -> str:
    """Returns what would be lost if a bundle took a folder's place, "" if nothing.

    A bundle may be replaced, a damaged one too if one of its two records can be read and lists all its files.
    """
    if folder.is_symlink():
        return "a link; name the folder it leads to"
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "something else"
    try:
        recorded = _recorded_paths(folder)
        added = sorted(find_added(folder, recorded or ()))
    except BundleError as error:
        return " ".join(error.message.split())
    if recorded is None:  # other programs call a file manifest.json or loader.json too
        names = sorted(entry.name for entry in folder.iterdir())
        return _shorten(names)
    return f"one with files that ortprep did not write: {_shorten(added)}" if added else ""


def _recorded_paths(folder: Path) -> tuple[str, ...] | None:
    """Returns what a manifest lists, or else a loader config; None where neither is readable."""
    from ortprep.bundle.manifest import read_manifest

    with suppress(BundleError):
        return tuple(entry.path for entry in read_manifest(folder).files)
    with suppress(BundleError):
        return (*_AT_THE_TOP, *(entry.path for entry in listed_files(read_loader_config(folder))))
    return None


def _shorten(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")


def raise_differences(
    root: StrPath, differences: tuple[FileDifference, ...], *, hint: str | None = None
) -> None:
    """Raises `IntegrityError` if there are differences, naming all; `hint` is what to do about them."""
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences)
        raise IntegrityError(
            f"bundle is not as it was written: {root}\n{lines}",
            hint=hint or f"ortprep check {quoted(root)}",
        )


def _refuse_unreadable(error: OSError) -> None:
    raise BundleError(f"cannot read {error.filename}\n  {error.strerror or error}") from error
