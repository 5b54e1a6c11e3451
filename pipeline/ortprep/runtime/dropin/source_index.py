"""Which bundles there are, and of which models: by size and digest of the files they were prepared from.

To import what reads a `loader.json` with all its checks takes longer than many a model's session. So only
what it says of its source is looked for; a bundle is checked when it is opened.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import (
    DIGEST_FOLDER,
    Stamp,
    cache_folder,
    find_stamp,
    open_regular,
    read_digest,
    read_stamp,
)
from ortprep.runtime.dropin.launch import PULL_HINT
from ortprep.runtime.loading.opened_bundle import log_line

if TYPE_CHECKING:
    from ortprep.errors import PipelineError

_MAX_BYTES = 1024 * 1024
_SOURCE_LIST = re.compile(rb'\n "source": \[(.*?)\n \]', re.DOTALL)
_FILE = re.compile(
    rb'\{\s*"path": "((?:[\w-][\w.-]*/)*[\w-][\w.-]*)",\s*"size_bytes": (\d{1,18}),'
    rb'\s*"sha256": "(sha256:[0-9a-f]{64})",\s*"blocks": "((?:sha256:[0-9a-f]{64})?)"\s*\}'
)
"""How a build writes the source into `loader.json`, unless a path has other characters."""


class SourceFile(NamedTuple):
    """A file that a bundle was prepared from.

    Attributes:
        path: The model's name, or where its external data lies, relative to the model's folder.
        sha256: Its digest, `sha256:<hex>`.
        blocks: Digest of the digests of its blocks; "" for a file of one block.
    """

    path: str
    size_bytes: int
    sha256: str
    blocks: str


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
        return all(_is_same(path, file) for path, file in files)
    except OSError:
        return False


def _is_same(path: str, file: SourceFile) -> bool:
    """Returns whether a file has a source's bytes; its digest is remembered if its stamp is the same."""
    remembered = read_digest(read_stamp(path), cache_folder(DIGEST_FOLDER))
    if remembered is not None:
        return remembered == file.sha256
    from ortprep.bundle.digest import DigestCache

    cache = DigestCache()
    return cache.digest_blocks(path) == file.blocks if file.blocks else cache.digest(path) == file.sha256


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
    """Lists the bundles below a folder, or the folder itself if it is one; reads those only that are new."""
    is_bundle = os.path.isfile(f"{folder}/{LOADER_FILE}")
    names = ["."] if is_bundle else sorted(name for name in os.listdir(folder) if not name.startswith("."))
    bundles = []
    for name in names:
        path = f"{folder}/{name}"
        loader = find_stamp(f"{path}/{LOADER_FILE}")
        if not loader[1]:
            continue
        bundle = _KNOWN.get(path)
        if bundle is None or bundle.loader != loader:
            bundle = _KNOWN[path] = IndexedBundle(path, loader, _read_source(path))
        bundles.append(bundle)
    return bundles


def _read_source(folder: str) -> tuple[SourceFile, ...]:
    """Returns which source a bundle was made of; one that cannot be read counts as made of none."""
    try:
        with open_regular(f"{folder}/{LOADER_FILE}") as file:
            match = _SOURCE_LIST.search(file.read(_MAX_BYTES))
    except OSError:
        match = None
    listed = b"" if match is None else match[1]
    files = _FILE.findall(listed)
    if files and len(files) == listed.count(b"{"):
        return tuple(
            SourceFile(path.decode(), int(size), sha256.decode(), blocks.decode())
            for path, size, sha256, blocks in files
        )
    return _read_carefully(folder)


def _read_carefully(folder: str) -> tuple[SourceFile, ...]:
    """Does what `_read_source` does, of JSON in any form."""
    from ortprep.bundle.loader_config import read_loader_config
    from ortprep.errors import PipelineError

    try:
        source = read_loader_config(folder).source
    except PipelineError as error:
        log_line("warning", "cannot use %s: %s", folder, describe_error(error))
        return ()
    return tuple(SourceFile(*file) for file in source)
