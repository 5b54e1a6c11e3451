"""Links between files: hard ones that are made, symbolic ones that are refused.

A hard link is a second place of a file without a copy of its bytes, where ONNX Runtime loads it from there.

ONNX Runtime checks the graphs that nodes hold, branches and loop bodies, as the onnx package does: external
data of theirs is refused if it has more than one hard link, or is reached by a symbolic one ("possible
hardlink attack"; seen on 1.31.1). Weights of the main graph are not looked at in this way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_memory import read_stamp
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.errors import SpecError
from ortprep.quoting import quoted

_BLOCK_BYTES = 1024 * 1024


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuses symbolic links where something is written or removed: a clone can bring them.

    Raises:
        SpecError: A path is one; those after it are not asked for.
    """
    link = next((path for path in paths if path.is_symlink()), None)
    if link is not None:
        raise SpecError(
            f"link where files are written: {link}\n  expected a file or folder, as a link may lead anywhere",
            hint=quoted("rm", link),
        )


def share_model(model: Path, destination: Path) -> None:
    """Puts a model into a second place, and with it every other file of its folder, under the same names.

    Files are hard links where ONNX Runtime takes them, else copies.

    Raises:
        OSError: The disk is full or read-only, or a file of that name is there.
    """
    models = {model, *model.parent.rglob("*.onnx")}
    unlinkable = {
        path.parent.relative_to(model.parent) / name for path in models for name in unlinkable_files(path)
    }
    for path in sorted(model.parent.rglob("*")):
        if path.is_file():
            name = path.relative_to(model.parent)
            put = copy_file if name in unlinkable else link_or_copy
            put(path, destination if path == model else destination.parent / name)


def unlinkable_files(model: Path, between_reads: Callable[[], object] = lambda: None) -> frozenset[Path]:
    """Returns the files, relative to the model's folder, that ONNX Runtime takes with one link only.

    `between_reads` is called now and then; what it raises ends the reading.
    """
    try:
        skeleton = read_skeleton(model, between_reads=between_reads)
        names = external_locations(skeleton, in_subgraphs_only=True, between_reads=between_reads)
        return frozenset(Path(PurePosixPath(name)) for name in names)
    except WireError:  # another format, ONNX Runtime's own, which has no external data
        return frozenset()


def link_or_copy(source: Path, destination: Path) -> None:
    """Makes a hard link of a finished file, or a copy where the file system has no such thing.

    A link changes the file's change time and none of its bytes, so a digest that is known stays known, and
    gigabytes of weights are not hashed again for it.

    Raises:
        OSError: The disk is full or read-only, or a file of that name is there.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    cache, before = DigestCache(), read_stamp(source)
    digest = cache.digest(source)
    try:
        os.link(source, destination)
    except FileExistsError:
        raise
    except OSError:
        copy_file(source, destination)
    else:
        if read_stamp(destination)[:-1] == before[:-1]:  # else somebody exchanged the source meanwhile
            cache.record(destination, digest)


def copy_file(source: Path, destination: Path) -> None:
    """Makes a copy; as `link_or_copy`."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, destination.open("xb") as writer:
        shutil.copyfileobj(reader, writer, _BLOCK_BYTES)
