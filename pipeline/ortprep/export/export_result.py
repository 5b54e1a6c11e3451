"""What was exported: as it is recorded beside it, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import FileEntry
from ortprep.export.option_mapping import MappedOptions, UnmappedOption
from ortprep.runtime.loading.variant_selection import PassedOver


@dataclass(frozen=True)
class ExportedModel:
    """One variant of a bundle in an export.

    Attributes:
        name: What it is called there.
        bundle: Name of the bundle's model.
        variant: Name of the variant.
        source_sha256: Digest of the model the bundle was prepared from.
        prepared_with: Version of ONNX Runtime it was prepared with.
        files: Its files in the export; bytes and digests are the bundle's.
        carried: Recorded options the export has.
        left_out: What of the variant it does not have, and why.
        needs: What its server must have; nothing there checks it.
        trial: What came of running it here, in a sentence.
    """

    name: str
    bundle: str
    variant: str
    source_sha256: str
    prepared_with: str
    files: tuple[FileEntry, ...]
    carried: tuple[MappedOptions, ...]
    left_out: tuple[UnmappedOption, ...]
    needs: tuple[str, ...]
    trial: str


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote.

    Attributes:
        path: The folder.
        models: What is new in it.
        passed_over: Variants that were not taken, and why.
    """

    path: Path
    models: tuple[ExportedModel, ...]
    passed_over: tuple[PassedOver, ...] = ()


def describe_model(model: ExportedModel) -> Iterator[str]:
    """Yields the lines that say what became of one variant: what it needs, and what it does not have."""
    size_mb = sum(entry.size_bytes for entry in model.files) / 2**20
    prepared = f", prepared with ONNX Runtime {model.prepared_with}" if model.prepared_with else ""
    yield f"{model.name}: variant {model.variant} of {model.bundle}, {size_mb:.1f} MB{prepared}"
    yield f"  {model.trial}"
    yield "  needs, and its server does not check:"
    yield from (f"    {need}" for need in model.needs)
    if model.carried:
        yield "  carried over:"
        yield from (f"    {one.option} -> {one.where}" for one in model.carried)
    yield "  left out:" if model.left_out else "  left out: nothing"
    yield from (f"    {one}" for one in model.left_out)
