"""Subjects of a report: bundles, or manifests by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.loader_config import LoaderConfig, read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest, read_manifest_file
from ortprep.errors import BundleError
from ortprep.quoting import quoted
from ortprep.tables import Table


@dataclass(frozen=True)
class ReportSubject:
    """One bundle of a model.

    Attributes:
        manifest: Its record.
        loader: Loader config of the bundle, None if only the manifest was given.
        history: The tasks of its build, one per row, if they are known.
    """

    manifest: Manifest
    loader: LoaderConfig | None = None
    history: Table | None = None


def find_manifests(names: Sequence[str], artifacts: Path) -> tuple[Path, ...]:
    """Returns manifests by names, each once: of models, folders of bundles, manifests; all if empty.

    Raises:
        BundleError: There is no such manifest, or none at all.
    """
    if names:
        paths = [_find_manifest(name, artifacts) for name in names]
    else:
        found = artifacts.glob(f"*/{MANIFEST_FILE}")
        paths = sorted(path for path in found if not path.parent.name.startswith("."))
        if not paths:
            raise BundleError(f"no bundle in {artifacts}\n  expected at least one", hint="ortprep prepare")
    return tuple({path.resolve(): path for path in paths}.values())


def _find_manifest(name: str, artifacts: Path) -> Path:
    """Returns the manifest of a name; raises `BundleError` if there is none."""
    for path in (Path(name), artifacts / name):
        if path.is_file():
            return path
        if (path / MANIFEST_FILE).is_file():
            return path / MANIFEST_FILE
    raise BundleError(
        f"no such bundle or manifest: {quoted(name)}\n"
        f"  expected a manifest, or {MANIFEST_FILE} in {Path(name)} or in {artifacts / name}, got none",
        hint=quoted("ortprep", "prepare", *filter(None, [Path(name).name])),
    )


def read_subjects(
    manifests: Iterable[Path], build_history: Callable[[Path], Table | None] = lambda _: None
) -> tuple[ReportSubject, ...]:
    """Reads manifests, and what lies beside them.

    Args:
        manifests: Files.
        build_history: Takes a bundle's folder and returns how it was built.

    Raises:
        BundleError: One of them is not of this form.
        UnsupportedVersionError: One has a newer major version.
        IntegrityError: One was changed.
    """
    subjects = []
    for path in manifests:
        folder = path.parent
        if path.name != MANIFEST_FILE:
            subjects.append(ReportSubject(read_manifest_file(path)))
            continue
        loader = read_loader_config(folder) if (folder / LOADER_FILE).is_file() else None
        subjects.append(ReportSubject(read_manifest(folder), loader, build_history(folder)))
    return tuple(subjects)
