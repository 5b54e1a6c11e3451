"""What `ortprep compare` compares: manifests in folders, in files of any name, and in registries."""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeline.bundle.codec import decode, parse_json
from pipeline.bundle.loader_config import check_file_entries
from pipeline.bundle.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA_VERSION,
    MAX_MANIFEST_BYTES,
    Manifest,
    read_manifest,
)
from pipeline.bundle.record import read_record
from pipeline.errors import BundleError
from pipeline.spec.redaction import redact_url

_OWN = "registry://"


def read_compared(text: str, *, artifacts: Path, registry: str | None) -> Manifest:
    """Returns the manifest that a user names.

    Args:
        text: A model below `artifacts`, a bundle's folder, a manifest's file, `NAME@VERSION` or
            `registry://NAME@VERSION` in a registry, or `REGISTRY/NAME@VERSION` with the registry's URL. What
            lies on this machine goes first.
        artifacts: Folder of bundles.
        registry: URL of the registry, None for what `$ORTPREP_REGISTRY` names.

    Raises:
        BundleError: There is nothing of that name, or nothing that can be read.
        IntegrityError: It was changed after it was written.
        NotPublishedError: The registry has no such version.
        RegistryError: The registry failed, or none was named.
    """
    if "://" in text:
        return _read_version(text, registry)
    if Path(text).is_file():
        return _read_file(Path(text))
    for folder in (Path(text), artifacts / text):
        if (folder / MANIFEST_FILE).is_file():
            return read_manifest(folder)
    if "@" in text and "/" not in text:
        return _read_version(f"{_OWN}{text}", registry)
    raise BundleError(
        f"nothing to compare: {shlex.quote(text)}\n"
        f"  expected a model below {artifacts}, a bundle, a {MANIFEST_FILE}, or NAME@VERSION, got no such",
        hint="ortprep compare NAME@VERSION NAME --registry URL   (what was published against what is here)",
    )


def _read_file(path: Path) -> Manifest:
    manifest = read_record(Manifest, path, supported=MANIFEST_SCHEMA_VERSION, max_bytes=MAX_MANIFEST_BYTES)
    check_file_entries(manifest.files, name=str(path))
    return manifest


def _read_version(location: str, registry: str | None) -> Manifest:
    """Returns the manifest of a version with all of its variants; the models stay where they are."""
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.composition import compose, list_candidates
    from pipeline.registry.references import default_registry, parse_reference, split_location
    from pipeline.registry.state import resolve

    if location.startswith(_OWN):
        url, reference = registry or default_registry(), parse_reference(location.removeprefix(_OWN))
    else:
        url, reference = split_location(location)
    with open_catalogue(url) as catalogue:
        state = catalogue.read_state(reference.name)
        version = resolve(state, reference.version, registry=redact_url(url))
        parts = catalogue.read_parts(state, version)
    written = compose(list_candidates(parts)).written.get(MANIFEST_FILE)
    # What was published by one machine alone is its own bundle, byte for byte.
    return parts[0].manifest if written is None else decode(Manifest, parse_json(written, name=location))
