"""The bundle that is exported: read once, every byte checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import LoaderConfig, read_loader_config
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.bundle.verification import check_bundle


@dataclass(frozen=True)
class SourceBundle:
    """A bundle's folder, free of links, with its loader config and manifest."""

    root: Path
    config: LoaderConfig
    manifest: Manifest

    @property
    def prepared_with(self) -> str:
        """Version of ONNX Runtime that prepared it, "" if that is not recorded."""
        return str(self.manifest.environment.get("onnxruntime", ""))


def read_source(bundle: Path) -> SourceBundle:
    """Reads a bundle after every file of it was compared with its record.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs from what was written.
    """
    root = Path(os.path.realpath(bundle))
    check_bundle(root, DigestCache().digest)
    return SourceBundle(root, read_loader_config(root), read_manifest(root))
