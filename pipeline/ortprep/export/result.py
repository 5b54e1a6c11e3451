"""Request and result of an export, and the record of it that lies in the export."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ortprep
from ortprep.bundle.atomic import write_json_atomic
from ortprep.bundle.codec import encode, read_json
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import BundleError, ExportError
from ortprep.runtime.loading.variant_selection import FASTEST, PassedOver
from ortprep.runtime.machine.hardware import Hardware

EXPORT_FILE = "ortprep-export.json"
EXPORT_SCHEMA_VERSION = "1.0"


@dataclass(frozen=True)
class ExportRequest:
    """Variants to export, their server, and its settings.

    Attributes:
        variants: Names of variants; empty for a choice.
        target: `cpu` or `cuda`, None for any.
        precision: One of `ortprep.runtime.loading.variant_selection.PRECISIONS`, or `FASTEST` for any.
        onnxruntime: The server's version of ONNX Runtime, None if it is not known.
        hardware: The server's processor and GPUs, None if they are not known.
        name: Name of the model or package, None for the first bundle's. With several variants of a bundle,
            Triton's models are NAME-VARIANT.
        instances: Triton's instances on the processor, or on each GPU.
        max_batch_size: Largest batch that Triton may form; 0 leaves requests as they are.
    """

    variants: tuple[str, ...] = ()
    target: str | None = None
    precision: str = FASTEST
    onnxruntime: str | None = None
    hardware: Hardware | None = None
    name: str | None = None
    instances: int = 1
    max_batch_size: int = 0


@dataclass(frozen=True)
class ExportedModel:
    """One variant of a bundle in an export.

    Attributes:
        name: Its name in the export.
        bundle: Name of the bundle's model.
        variant: Name of the variant.
        source_sha256: Digest of the model the bundle was prepared from.
        prepared_with: Version of ONNX Runtime it was prepared with, "" if that is not recorded.
        files: Its files in the export; bytes and digests are the bundle's.
        carried: Recorded options that the export has, and where.
        left_out: Recorded options and other properties that it does not have, and why.
        needs: Requirements of the variant, which its server does not check.
        trial: Result of running it here, in a sentence.
    """

    name: str
    bundle: str
    variant: str
    source_sha256: str
    prepared_with: str
    files: tuple[FileEntry, ...]
    carried: Mapping[str, str]
    left_out: Mapping[str, str]
    needs: tuple[str, ...]
    trial: str


@dataclass(frozen=True)
class ExportResult:
    """Models that an export wrote.

    Attributes:
        path: Folder of the export.
        models: The new models in it.
        passed_over: Variants that were not taken, and why.
    """

    path: Path
    models: tuple[ExportedModel, ...]
    passed_over: tuple[PassedOver, ...] = ()


def describe_model(model: ExportedModel) -> Iterator[str]:
    """Yields the lines that describe one exported model: its needs, and the options it has and lacks."""
    size_mb = sum(entry.size_bytes for entry in model.files) / 2**20
    prepared = f", prepared with ONNX Runtime {model.prepared_with}" if model.prepared_with else ""
    yield f"{model.name}: variant {model.variant} of {model.bundle}, {size_mb:.1f} MB{prepared}"
    yield f"  {model.trial}"
    yield "  needs, and its server does not check:"
    yield from (f"    {need}" for need in model.needs)
    if model.carried:
        yield "  carried over:"
        yield from (f"    {option} -> {where}" for option, where in model.carried.items())
    yield "  left out:" if model.left_out else "  left out: nothing"
    yield from (f"    {what}: {reason}" for what, reason in model.left_out.items())


def write_export_record(folder: Path, layout: str, models: Sequence[ExportedModel]) -> None:
    """Writes the record of an export, which marks the folder as one."""
    record = {
        "schema_version": EXPORT_SCHEMA_VERSION,
        "layout": layout,
        "pipeline_version": ortprep.__version__,
        "models": encode(models),
    }
    write_json_atomic(folder / EXPORT_FILE, record)


def resolve_destination(out: Path, bundles: Sequence[Path]) -> Path:
    """Returns the folder of an export, links followed; raises if it is a file or inside a bundle."""
    place = Path(os.path.realpath(out))
    for bundle in bundles:
        if place.is_relative_to(os.path.realpath(bundle)):
            raise ExportError(
                f"will not export into a bundle\n  expected a folder outside {bundle}, got {out}",
                hint="choose another --out",
            )
    if place.exists() and not place.is_dir():
        raise ExportError(
            f"will not overwrite {out}\n  expected a folder, got a file", hint="choose another --out"
        )
    return place


def check_replaceable(folder: Path, *, layout: str) -> None:
    """Raises unless a folder is absent, empty, or marked by its record as an export in this layout."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        found = read_json(folder / EXPORT_FILE).get("layout")
    except BundleError:
        found = None
    if found != layout:
        raise ExportError(
            f"will not overwrite {folder}\n"
            f"  expected no such folder, or an export of ortprep ({layout}), got {found or 'something else'}",
            hint="choose another --out, or remove it yourself",
        )
