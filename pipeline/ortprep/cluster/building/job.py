"""One model on one kind of hardware: what a node is asked for, and what it answers.

A spec travels with the files that it names beside its source, and with the receipt of the fetched source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.build.receipts import TaskReceipt, outcome_key
from ortprep.bundle.codec import encode
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import SourceError, SpecError
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.accuracy import metric_files
from ortprep.stages.core.inputs.sample_files import find_calibration_files, find_sample_files


@dataclass(frozen=True)
class ShippedSpec:
    """A spec as it travels.

    Attributes:
        data: The spec, as JSON types.
        file: Name of its file, for messages.
        place: Path of its folder relative to that of `files`, `.` for the same.
        files: Samples, calibration and metric.
    """

    data: Mapping[str, Any]
    file: str
    place: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class BuildJob:
    """A model that a node has to build.

    Attributes:
        spec: Spec of the model.
        source: Receipt of the fetched source.
        kind: Kind of hardware.
        target: Target of the bundle: `cpu` or `cuda`.
        store: URL of the work store.
        registry: URL of the registry.
    """

    spec: ShippedSpec
    source: TaskReceipt
    kind: str
    target: str
    store: str
    registry: str

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.spec.data["name"])

    @property
    def name(self) -> str:
        """Name of the job, for people."""
        return f"{self.model}@{self.kind}"

    @property
    def source_digest(self) -> str:
        """Digest of the fetched source, whenever and wherever it was fetched."""
        return digest_json(outcome_key(self.source))

    @property
    def digest(self) -> str:
        """Digest of all that decides what is built, and where it is published."""
        others = (self.kind, self.target, self.store, self.registry)
        return digest_json([encode(self.spec), self.source_digest, *others])


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        part: Digest of the part that is in the registry; None if something failed.
        is_current: Whether an earlier job had done all of it.
        failures: Errors by `ortprep.errors.to_dict`.
    """

    part: str | None = None
    is_current: bool = False
    failures: tuple[Mapping[str, Any], ...] = ()


def describe_spec(spec: ModelSpec) -> tuple[ShippedSpec, Path]:
    """Returns a spec as it travels, and the folder that has its files.

    Raises:
        SpecError: An application judges, which runs on its own machine only.
        SourceError: A file of the spec cannot be read.
    """
    if spec.convert is not None and spec.convert.judge is not None:
        raise SpecError(
            f"convert.judge cannot be run on other machines: {spec.name}\n"
            f"  expected a gate, got the program {spec.convert.judge.run[0]}",
            hint=f"ortprep prepare {quoted(spec.name)}   (on the machine of the application)",
        )
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
    place = folder.relative_to(root).as_posix()
    return ShippedSpec(spec.model_dump(mode="json"), Path(spec.place).name, place, files), root


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
