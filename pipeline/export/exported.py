"""What was exported, as it is recorded beside it and told to whoever asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.loader_config import FileEntry
from pipeline.export.carrying import Carried, LeftOut
from pipeline.runtime.loading.variant_selection import PassedOver


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
    carried: tuple[Carried, ...]
    left_out: tuple[LeftOut, ...]
    needs: tuple[str, ...]
    trial: str


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: The folder.
        models: What is new in it.
        passed_over: Variants that were not taken, and why.
    """

    path: Path
    models: tuple[ExportedModel, ...]
    passed_over: tuple[PassedOver, ...] = ()
