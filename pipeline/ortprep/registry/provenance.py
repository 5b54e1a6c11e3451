"""Where a bundle is from, as tools read it: an in-toto statement with SLSA provenance.

It is a function of the bundle's manifest, so publishing a bundle again publishes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode, format_json, read_json
from ortprep.bundle.digest import PREFIX, digest_json
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.manifest import Manifest
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import BundleError, IntegrityError
from ortprep.registry.documents import PROVENANCE, Part

_BUILDER = "urn:ortprep:prepare"
"""Says what built it, and not who: a statement is as trustworthy as the signature of its part."""

_MAX_STATEMENT_BYTES = 64 * 1024 * 1024


def check_provenance(folder: Path, part: Part) -> None:
    """Checks that the provenance in a bundle is of the part's own files and source, if the part has one.

    Raises:
        IntegrityError: It is of others.
        BundleError: It is no statement.
    """
    if PROVENANCE not in {entry.path for entry in part.files}:
        return
    statement = read_json(resolve_inside(folder, PROVENANCE), max_bytes=_MAX_STATEMENT_BYTES)
    try:
        stated = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        definition = statement["predicate"]["buildDefinition"]
        sources = [one["digest"] for one in definition["resolvedDependencies"] if one["name"] == "source"]
    except (KeyError, TypeError) as error:
        raise BundleError(f"not a provenance: {PROVENANCE}\n  expected an in-toto statement") from error
    files = {entry.path: _hex(entry.sha256) for entry in part.files if entry.path != PROVENANCE}
    differing = sorted(str(path) for path in stated.keys() | files if stated.get(path) != files.get(path))
    if sources != [{"sha256": _hex(part.source)}]:
        differing.append("the source")
    if differing:
        raise IntegrityError(
            f"provenance of something else: {PROVENANCE}\n"
            f"  expected the digests of {part.digest}, got others of {', '.join(differing[:5])}"
        )


def build_provenance(manifest: Manifest, files: Iterable[FileEntry]) -> bytes:
    """Returns what is published, and signed, beside a bundle's `files`: an in-toto statement (v1)."""
    source = manifest.source.sha256
    dependencies: list[dict[str, Any]] = [
        {"name": "source", "uri": f"urn:ortprep:source:{source}", "digest": {"sha256": _hex(source)}}
    ]
    if manifest.spec_commit is not None:
        dependencies.append({"name": "spec", "digest": {"gitCommit": manifest.spec_commit}})
    ordered = sorted(files, key=lambda entry: entry.path)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": entry.path, "digest": {"sha256": _hex(entry.sha256)}} for entry in ordered],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{_BUILDER}:v1",
                "externalParameters": {"model": manifest.name, "spec": manifest.spec_digest},
                "internalParameters": {"environment": encode(manifest.environment)},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": _BUILDER, "version": {"ortprep": manifest.pipeline_version}},
                "metadata": {
                    "invocationId": digest_json(encode(manifest)),
                    "finishedOn": manifest.created_at.replace("+00:00", "Z"),
                },
            },
        },
    }
    return format_json(statement)


def _hex(digest: str) -> str:
    return digest.removeprefix(PREFIX)
