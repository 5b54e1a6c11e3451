"""The bundle that is exported: read once, every byte checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.digest import DigestCache
from pipeline.bundle.loader_config import LoaderConfig, Variant, read_loader_config
from pipeline.bundle.manifest import Manifest, read_manifest
from pipeline.bundle.verification import check_bundle


@dataclass(frozen=True)
class Source:
    """A bundle.

    Attributes:
        root: Its folder, free of links.
        config: Its loader config.
        manifest: Its manifest.
    """

    root: Path
    config: LoaderConfig
    manifest: Manifest

    def prepared_with(self, variant: Variant) -> str:
        """Returns the version of ONNX Runtime that prepared a variant, "" if that is not recorded."""
        parts = [part.environment for part in self.manifest.parts if variant.name in part.variants]
        return str((parts or [self.manifest.environment])[0].get("onnxruntime", ""))


def read_source(bundle: Path) -> Source:
    """Reads a bundle after every file of it was compared with its record.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs from what was written.
    """
    root = Path(os.path.realpath(bundle))
    check_bundle(root, DigestCache().digest)
    return Source(root, read_loader_config(root), read_manifest(root))
