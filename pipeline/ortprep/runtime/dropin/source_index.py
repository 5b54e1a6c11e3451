"""Which bundles there are, and of which models: by size and digest of the files they were prepared from.

To read a `loader.json` takes longer than many a model's session. So what each says of its source is
remembered per folder of bundles, by the stamp of the `loader.json`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import (
    DIGEST_FOLDER,
    Stamp,
    cache_folder,
    entry_path,
    find_stamp,
    is_settled,
    read_digest,
    read_entry,
    read_stamp,
    write_entry,
)
from ortprep.runtime.dropin.launch import PULL_HINT
from ortprep.runtime.loading.opened_bundle import log_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ortprep.errors import PipelineError

_MAX_INDEX_BYTES = 16 * 1024 * 1024


class SourceFile(NamedTuple):
    """A file that a bundle was prepared from.

    Attributes:
        path: The model's name, or where its external data lies, relative to the model's folder.
        sha256: Its digest, `sha256:<hex>`.
    """

    path: str
    size_bytes: int
    sha256: str


class IndexedBundle(NamedTuple):
    """A bundle, and what it was prepared from.

    Attributes:
        loader: Stamp of its `loader.json`.
        source: The model, then its external data; empty if the bundle is damaged or does not record them.
    """

    folder: str
    loader: Stamp
    source: tuple[SourceFile, ...]


def list_bundles(places: str) -> list[IndexedBundle]:
    """Returns the bundles of some places, in order of place and name.

    A place that cannot be read, and a bundle that is damaged, are logged at WARNING and left out; so is,
    without a word, a bundle that does not record its source.

    Args:
        places: Folders, each a bundle or full of bundles, separated by `os.pathsep`.
    """
    listed = (_list_place(place) for place in places.split(os.pathsep) if place)
    return [bundle for bundles in listed for bundle in bundles if bundle.source]


def describe_error(error: PipelineError) -> str:
    """Returns an error and its hint in one line of a log."""
    lines = error.message if error.hint is None else f"{error.message} (hint: {error.hint})"
    return " ".join(lines.split())


def is_source(bundle: IndexedBundle, model: str) -> bool:
    """Returns whether a file is the model that a bundle was prepared from, its external data included.

    Sizes are compared first; a digest is computed once per file and machine. A file that is missing or cannot
    be read is none of the bundle's.
    """
    folder = os.path.dirname(model)
    first, *external = bundle.source
    files = [(model, first), *((os.path.join(folder, file.path), file) for file in external)]
    try:
        if any(os.stat(path).st_size != file.size_bytes for path, file in files):
            return False
        return all(_digest(path) == file.sha256 for path, file in files)
    except OSError:
        return False


def _digest(path: str) -> str:
    """Returns the digest of a file, remembered if its stamp is the same."""
    remembered = read_digest(read_stamp(path), cache_folder(DIGEST_FOLDER))
    if remembered is not None:
        return remembered
    from pathlib import Path

    from ortprep.bundle.digest import DigestCache

    return DigestCache().digest(Path(path))


_KNOWN: dict[str, IndexedBundle] = {}
"""Every bundle that this process has seen, by folder."""


def _list_place(place: str) -> list[IndexedBundle]:
    """Lists the bundles of a folder; logs why it cannot be read."""
    try:
        return _list_folder(os.path.realpath(os.path.expanduser(place)))
    except OSError as error:
        hint = f" (hint: {PULL_HINT})" if "@" in place else ""
        log_line("warning", "no bundles in %s: %s%s", place, error.strerror, hint)
        return []


def _list_folder(folder: str) -> list[IndexedBundle]:
    """Lists the bundles below a folder; reads those only that are new since the index was written."""
    stamped = {name: find_stamp(f"{folder}/{name}/{LOADER_FILE}") for name in _subfolders(folder)}
    stamps = {name: stamp for name, stamp in stamped.items() if stamp[1]}
    if any(_known(folder, name, stamp) is None for name, stamp in stamps.items()):
        _recall(folder)
        unread = [name for name, stamp in stamps.items() if _known(folder, name, stamp) is None]
        if unread:
            for name in unread:
                _read(folder, name, stamps[name])
            # A newer version may read a bundle that this one cannot, so that is not written to the index.
            if any(_KNOWN[f"{folder}/{name}"].source for name in unread):
                _remember(folder, stamps)
    bundles = (_known(folder, name, stamp) for name, stamp in stamps.items())
    return [bundle for bundle in bundles if bundle is not None]


def _subfolders(folder: str) -> list[str]:
    """Returns the names of what may be bundles: the folder itself if it is one."""
    if os.path.isfile(f"{folder}/{LOADER_FILE}"):
        return ["."]
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def _known(folder: str, name: str, loader: Stamp) -> IndexedBundle | None:
    bundle = _KNOWN.get(f"{folder}/{name}")
    return bundle if bundle is not None and bundle.loader == loader else None


def _read(folder: str, name: str, loader: Stamp) -> None:
    """Reads which source a bundle was made of; one that cannot be read counts as made of none."""
    from pathlib import Path

    from ortprep.bundle.loader_config import read_loader_config
    from ortprep.errors import PipelineError

    path = f"{folder}/{name}"
    try:
        files = read_loader_config(Path(path)).source
    except PipelineError as error:
        log_line("warning", "cannot use %s: %s", path, describe_error(error))
        files = ()
    source = tuple(SourceFile(file.path, file.size_bytes, file.sha256) for file in files)
    _KNOWN[path] = IndexedBundle(path, loader, source)


def _recall(folder: str) -> None:
    """Loads what other processes read; entries of this process win."""
    content = read_entry(_index_path(folder), max_bytes=_MAX_INDEX_BYTES) or b""
    try:
        for line in content.decode().split("\n"):
            name, *fields = line.split("\t")
            device, inode, size, modified, changed = map(int, fields[:5])
            files = zip(fields[5::3], map(int, fields[6::3]), fields[7::3], strict=True)
            path = f"{folder}/{name}"
            loader = device, inode, size, modified, changed
            _KNOWN.setdefault(path, IndexedBundle(path, loader, tuple(SourceFile(*file) for file in files)))
    except ValueError:
        return


def _remember(folder: str, stamps: Mapping[str, Stamp]) -> None:
    """Writes the index of a folder, without bundles that may have been written to just now."""
    bundles = (_known(folder, name, stamp) for name, stamp in stamps.items())
    lines = [
        _format(folder, bundle)
        for bundle in bundles
        if bundle and bundle.source and is_settled(bundle.loader)
    ]
    content = "\n".join(line for line in lines if line.replace("\t", "").isprintable()).encode()
    try:
        if len(content) <= _MAX_INDEX_BYTES:
            write_entry(_index_path(folder), content)
    except OSError as error:
        log_line("debug", "cannot cache the list of bundles: %s", error)


def _format(folder: str, bundle: IndexedBundle) -> str:
    fields: Iterable[object] = (value for file in bundle.source for value in file)
    name = bundle.folder[len(folder) + 1 :]
    return "\t".join(map(str, (name, *bundle.loader, *fields)))


def _index_path(folder: str) -> str | None:
    return entry_path(cache_folder("sources"), read_stamp(folder))
