"""The files of a variant on their way into a session: read ahead, compared with their records, watched."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.bundle.digest import DigestCache, digest_file
from pipeline.bundle.loader_config import LoaderConfig, Variant, golden_of
from pipeline.bundle.paths import resolve_inside
from pipeline.bundle.verification import (
    Difference,
    compare_bundle,
    compare_files,
    compare_kinds,
    raise_differences,
)
from pipeline.errors import IntegrityError
from pipeline.runtime.page_cache import start_prefetch

if TYPE_CHECKING:
    from pipeline.runtime.deadline import Deadline
    from pipeline.runtime.loading import DigestPolicy

Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time: equal as long as a file is neither replaced nor written to."""


def identify(path: Path) -> Identity | None:
    """Returns what tells whether a file is still the same, None where there is none.

    Its change time is left out: a build that shares the file by a hard link sets it.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class VariantFiles:
    """The files of one variant, as they were when they were compared.

    Attributes:
        root: The bundle's folder.
        identities: Every file with what it was before it was looked at.
        differences: What is wrong with them, and under the policy `full` with any file of the bundle.
    """

    root: Path
    identities: tuple[tuple[Path, Identity | None], ...]
    differences: tuple[Difference, ...]

    def check(self) -> None:
        """Raises if something is wrong with the files.

        Raises:
            IntegrityError: There is a difference; the message lists every one.
        """
        raise_differences(self.root, self.differences)

    def check_unchanged(self) -> None:
        """Raises unless the files are still those that were compared.

        Raises:
            IntegrityError: One was replaced or written to since.
        """
        changed = [path.name for path, identity in self.identities if identify(path) != identity]
        if changed:
            raise IntegrityError(
                f"files changed while they were loaded: {self.root}\n"
                f"  expected those that were checked, got other {', '.join(changed)}"
            )


def fetch_files(
    root: Path,
    config: LoaderConfig,
    variant: Variant,
    *,
    digests: DigestPolicy,
    with_golden: bool,
    deadline: Deadline,
) -> VariantFiles:
    """Has the files of a variant read ahead, and compares them with their records as the policy says.

    Args:
        root: The bundle's folder.
        config: Its loader config.
        variant: One of its variants.
        digests: Which files are hashed.
        with_golden: Whether the golden sample is used too.
        deadline: Ends the hashing.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: A path leaves the bundle, or its two records contradict each other.
        LoadTimeoutError: The deadline passed.
    """
    entries = (*variant.files, golden_of(config, variant).file) if with_golden else variant.files
    paths = tuple(resolve_inside(root, entry.path) for entry in entries)
    identities = tuple((path, identify(path)) for path in paths)
    start_prefetch(paths)
    if digests == "off":
        # The disk is trusted with the bytes, but ONNX Runtime would wait for the writer of a FIFO for ever.
        differences: Iterable[Difference] = compare_kinds(root, entries)
    elif digests == "full":
        differences = compare_bundle(
            root, functools.partial(digest_file, between_blocks=deadline.remaining_s)
        )
    else:
        cache = DigestCache(between_blocks=deadline.remaining_s)
        differences = compare_files(root, entries, cache.digest)
    return VariantFiles(root, identities, tuple(differences))
