"""The files that a spec names beside its source: they go to the nodes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import SourceError
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.accuracy import metric_files
from ortprep.stages.core.inputs.sample_files import find_calibration_files, find_sample_files


@dataclass(frozen=True)
class ShippedSpec:
    """A spec as it travels.

    Attributes:
        data: The spec, as JSON types.
        file: Name of its file, for messages.
        place: Where its folder lies among `files`: a relative path, `.` for the top.
        files: Samples, calibration and metric.
    """

    data: Mapping[str, Any]
    file: str
    place: str
    files: tuple[FileEntry, ...]


def describe_spec(spec: ModelSpec) -> tuple[ShippedSpec, tuple[Path, ...]]:
    """Returns a spec as it travels, and where each of its files is."""
    folder = Path(os.path.realpath(spec.folder))
    # Links of folders are followed, as a glob with `..` follows them; files go by the names they have.
    paths = sorted({Path(os.path.realpath(path.parent), path.name) for path in _find_files(spec)})
    root = Path(os.path.commonpath([folder, *(path.parent for path in paths)]))
    digest = DigestCache().digest
    try:
        files = tuple(
            FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, digest(path)) for path in paths
        )
    except OSError as error:
        raise SourceError(
            f"cannot read a file of the spec {spec.name}: {error.filename}\n  {error.strerror}"
        ) from error
    shipped = ShippedSpec(
        data=spec.model_dump(mode="json"),
        file=Path(spec.place).name,
        place=folder.relative_to(root).as_posix(),
        files=files,
    )
    return shipped, tuple(paths)


def place_spec(shipped: ShippedSpec, folder: Path) -> ModelSpec:
    """Returns the spec as if its file lay below a folder that has its files."""
    spec_folder = folder if shipped.place == "." else resolve_inside(folder, shipped.place)
    spec_folder.mkdir(parents=True, exist_ok=True)
    return ModelSpec.model_validate(shipped.data).located_in(spec_folder, file=shipped.file)


def _find_files(spec: ModelSpec) -> tuple[Path, ...]:
    metric = None if spec.convert is None else spec.convert.gate.metric
    return (
        *find_sample_files(spec),
        *(find_calibration_files(spec) or ()),
        *(() if metric is None else metric_files(metric, spec.folder)),
    )
