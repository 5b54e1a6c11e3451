"""The manifests that `ortprep compare` compares: in folders, in files of any name, and in registries."""

from __future__ import annotations

from pathlib import Path

from ortprep.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest
from ortprep.cli.command import locate_bundle
from ortprep.errors import BundleError
from ortprep.quoting import quoted
from ortprep.report.report_subjects import read_manifest_file
from ortprep.spec.redaction import redact_url


def read_compared(
    text: str, *, artifacts: Path, registry: str | None, if_published: bool = False
) -> tuple[Manifest, ...]:
    """Returns the manifests that a user names: one, or one per machine that prepared a published version.

    Args:
        text: A model below `artifacts`, a bundle's folder, a manifest's file, `NAME@VERSION` or
            `registry://NAME@VERSION` in a registry, or `REGISTRY/NAME@VERSION` with the registry's URL. What
            lies on this machine goes first.
        artifacts: Folder of bundles.
        registry: URL of the registry, None for what `$ORTPREP_REGISTRY` names.
        if_published: Whether a registry that was read, and has no version of that name, gives no manifests.

    Raises:
        BundleError: There is nothing of that name, or nothing that can be read.
        IntegrityError: It was changed after it was written.
        NotPublishedError: The registry has no such version.
        RegistryError: The registry failed, or none was named.
    """
    if is_in_registry(text, artifacts):
        return _read_version(text if "://" in text else f"registry://{text}", registry, if_published)
    if Path(text).is_file():
        return (read_manifest_file(Path(text)),)
    folder = locate_bundle(text, artifacts)
    if folder is not None:
        return (read_manifest(folder),)
    raise BundleError(
        f"nothing to compare: {quoted(text)}\n"
        f"  expected a model below {artifacts}, a bundle, a {MANIFEST_FILE}, or NAME@VERSION, got none",
        hint="ortprep compare NAME@VERSION NAME --registry URL   (published against local)",
    )


def is_in_registry(text: str, artifacts: Path) -> bool:
    """Returns whether a text names a version in a registry; what lies on this machine goes first."""
    if "://" in text:
        return True
    return "@" in text and "/" not in text and not Path(text).exists() and not (artifacts / text).exists()


def _read_version(location: str, registry: str | None, if_published: bool) -> tuple[Manifest, ...]:
    """Returns the manifests of a version's parts; the models stay where they are."""
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.references import split_location
    from ortprep.registry.versions import is_published, resolve

    url, reference = split_location(location, registry=registry)
    with open_catalogue(url) as catalogue:
        state = catalogue.read_state(reference.name)
        if if_published and not is_published(state, reference.version):
            return ()
        version = resolve(state, reference.version, registry=redact_url(url))
        return tuple(manifest for _, manifest in catalogue.read_manifests(catalogue.read_parts(version)))
