"""What `load` calls for a bundle in a registry, and for a signature that it has to have."""

from __future__ import annotations

from pathlib import Path

from ortprep.bundle.digest import DigestCache
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.pull import PullRequest, pull_cached
from ortprep.registry.receipt import verify_bundle
from ortprep.registry.references import split_location


def locate(bundle: str, *, require_signature: str | None = None) -> Path:
    """Returns the folder of a bundle, as `ortprep.runtime.loading.sources.locate` describes."""
    public_key = None if require_signature is None else Path(require_signature)
    path = Path(bundle)
    if "://" in bundle:
        url, reference = split_location(bundle)
        with open_catalogue(url) as catalogue:
            path = pull_cached(PullRequest(reference, public_key=public_key), catalogue).path
    if public_key is not None:
        verify_bundle(path, public_key, digest_cache=DigestCache())
    return path
