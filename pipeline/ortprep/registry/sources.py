"""Bundles in registries, and required signatures, for `load`."""

from __future__ import annotations

from pathlib import Path

from ortprep.bundle.loader_config import FileEntry
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.pull import PullRequest, pull_cached
from ortprep.registry.references import split_location
from ortprep.registry.signatures import read_signed_part


def locate(bundle: str, *, require_signature: str | None = None) -> tuple[Path, tuple[FileEntry, ...] | None]:
    """Returns the folder of a bundle, and the records of all its files that were signed.

    It takes and raises what `ortprep.runtime.loading.sources.locate` does. The records are None where no
    signature is required. No file is compared with them.
    """
    public_key = None if require_signature is None else Path(require_signature)
    path = Path(bundle)
    if "://" in bundle:
        url, reference = split_location(bundle)
        with open_catalogue(url) as catalogue:
            path = pull_cached(PullRequest(reference, public_key=public_key), catalogue).path
    return path, None if public_key is None else read_signed_part(path, public_key)[1].files
