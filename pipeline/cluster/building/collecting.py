"""The bundle that a model's parts became, fetched from the registry with all its variants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.bundle.digest import DigestCache
from pipeline.bundle.verification import check_bundle
from pipeline.errors import BundleError, ClusterError
from pipeline.registry.catalogue import Catalogue, open_catalogue
from pipeline.registry.choosing import ALL, Wanted
from pipeline.registry.pulling import pull
from pipeline.registry.receipt import has_receipt, read_receipt
from pipeline.registry.references import Reference
from pipeline.spec.redaction import redact_url


def collect_bundle(name: str, parts: Sequence[str], registry: str, out: Path) -> bool:
    """Fetches the version that parts were merged into, unless it is there, and returns whether it did.

    Args:
        name: The model.
        parts: Digests of what its nodes published.
        registry: Where.
        out: The bundle's folder.

    Raises:
        ClusterError: There is none: they are of different sources or specs, or were removed.
        PipelineError: As `registry.pulling.pull`.
    """
    with open_catalogue(registry) as catalogue:
        version = _find_version(name, parts, catalogue)
        if _is_there(out, version):
            return False
        pull(Wanted(Reference(name, version), ALL), catalogue, out)
    return True


def _find_version(name: str, parts: Sequence[str], catalogue: Catalogue) -> str:
    """Returns the digest of the version that parts were merged into.

    It need not have all of them: of two kinds of nodes that turn out to be the same hardware, the part that
    was prepared last takes the place of the other.
    """
    state = catalogue.read_state(name)
    families = {(state.parts[part].source, state.parts[part].spec) for part in parts if part in state.parts}
    current = [
        digest
        for digest, version in state.versions.items()
        if (version.record.source, version.record.spec) in families and not version.superseded_by
    ]
    if len(families) != 1 or not set(parts) <= set(state.parts) or not current:
        raise ClusterError(
            f"no version of {name} is of what its nodes published\n"
            f"  expected one of {', '.join(parts)} in {redact_url(catalogue.backend.url)}",
            hint=f"ortprep versions {name}   # something else was published, or collected, meanwhile",
        )
    return current[-1]


def _is_there(out: Path, version: str) -> bool:
    try:
        if not has_receipt(out) or read_receipt(out).version != version:
            return False
        check_bundle(out, DigestCache().digest)
    except BundleError:
        return False
    return True
