"""The version that a model's parts became: what fits this machine best, fetched from the registry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.verification import check_bundle
from ortprep.errors import BundleError, ClusterError
from ortprep.quoting import quoted
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.receipt import read_receipt
from ortprep.registry.references import VersionRef
from ortprep.spec.redaction import redact_url


def pull_merged_bundle(name: str, parts: Sequence[str], registry: str, out: Path) -> bool:
    """Pulls what fits this machine best of the version with all parts; returns whether that was not there."""
    with open_catalogue(registry) as catalogue:
        version = _find_version(name, parts, catalogue)
        if _is_there(out, version):
            return False
        pull(PullRequest(VersionRef(name, version)), catalogue, out)
    return True


def _find_version(name: str, parts: Sequence[str], catalogue: Catalogue) -> str:
    """Returns the digest of the version that parts were merged into.

    It need not have all of them: of two kinds of nodes that turn out to be the same hardware, the part that
    was prepared last takes the place of the other.
    """
    state = catalogue.read_state(name)
    holders = [version for version in state.versions.values() if not version.part_digests.isdisjoint(parts)]
    families = {version.family for version in holders}
    current = [
        digest
        for digest, version in state.versions.items()
        if version.family in families and digest not in state.superseded_by
    ]
    published = {part for version in holders for part in version.part_digests}
    if len(families) != 1 or not published.issuperset(parts) or not current:
        raise ClusterError(
            f"no version of {name} has the parts that its nodes published\n"
            f"  expected one of {', '.join(parts)} in {redact_url(catalogue.backend.url)}",
            hint=f"ortprep versions {quoted(name)}   # one was published or collected meanwhile",
        )
    return current[-1]


def _is_there(out: Path, version: str) -> bool:
    try:
        if read_receipt(out).version != version:
            return False
        check_bundle(out, DigestCache().digest)
    except BundleError:
        return False
    return True
