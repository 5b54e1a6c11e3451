"""What tools read of where a bundle is from: SLSA provenance and a model card.

Both are functions of the bundle's two records, so publishing a bundle again publishes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode, format_json, read_json
from ortprep.bundle.digest import PREFIX, digest_json
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, TensorSpec
from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import BundleError, IntegrityError
from ortprep.measuring.shipped import shipped_figures, worst_error
from ortprep.registry.documents import CARD, OWN_FILES, PROVENANCE, Part

_BUILDER = "urn:ortprep:prepare"
"""Says what built it, and not who: a statement is as trustworthy as the signature of its part."""

_MAX_STATEMENT_BYTES = 64 * 1024 * 1024


def describe_provenance(
    manifest: Manifest, config: LoaderConfig, files: Sequence[FileEntry]
) -> Mapping[str, bytes]:
    """Returns the documents that are published, and signed, beside a bundle's `files`, by path."""
    ordered = sorted(files, key=lambda entry: entry.path)
    return {
        PROVENANCE: format_json(_build_statement(manifest, ordered)),
        CARD: _build_card(manifest, config).encode(),
    }


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
    files = {entry.path: _hex(entry.sha256) for entry in part.files if entry.path not in OWN_FILES}
    differing = sorted(str(path) for path in stated.keys() | files if stated.get(path) != files.get(path))
    if sources != [{"sha256": _hex(part.source)}]:
        differing.append("the source")
    if differing:
        raise IntegrityError(
            f"provenance of something else: {PROVENANCE}\n"
            f"  expected the digests of {part.digest}, got others of {', '.join(differing[:5])}"
        )


def _build_statement(manifest: Manifest, files: Sequence[FileEntry]) -> dict[str, Any]:
    """Returns an in-toto statement (v1) with SLSA provenance (v1) of a bundle's files."""
    source = manifest.source.sha256
    dependencies: list[dict[str, Any]] = [
        {"name": "source", "uri": f"urn:ortprep:source:{source}", "digest": {"sha256": _hex(source)}}
    ]
    if manifest.spec_commit is not None:
        dependencies.append({"name": "spec", "digest": {"gitCommit": manifest.spec_commit}})
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": entry.path, "digest": {"sha256": _hex(entry.sha256)}} for entry in files],
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
                    "finishedOn": _utc(manifest.created_at),
                },
            },
        },
    }


def _list_figures(record: VariantRecord) -> Iterator[tuple[str, float, str]]:
    """Yields name, value and unit of what was measured of a variant as it is shipped."""
    figures = shipped_figures(record)
    if figures is not None:
        yield "ready", figures.ready_ms.median, "ms"
        yield "init", figures.init_ms.median, "ms"
        yield "steady", figures.steady_ms.median, "ms"
    worst = worst_error(record)
    if worst is not None:
        yield "largest error", worst, "of its tolerance"


def _build_card(manifest: Manifest, config: LoaderConfig) -> str:
    """Returns a model card as Hugging Face reads it: YAML in front, Markdown below."""
    tags = ["onnx", "ortprep", *sorted({record.target for record in manifest.variants})]
    commit = f"\n- commit: `{manifest.spec_commit}`" if manifest.spec_commit else ""
    tensors = "\n".join(
        f"- {kind} `{tensor.name}`: {_describe_tensor(tensor)}"
        for kind, side in (("input", config.inputs), ("output", config.outputs))
        for tensor in side
    )
    rows = "\n".join(
        f"| {record.name} | {record.target} | {name} | {value:.4g} {unit} |"
        for record in manifest.variants
        for name, value, unit in _list_figures(record)
    )
    return f"""---
library_name: onnxruntime
tags: {json.dumps(tags)}
model_name: {json.dumps(manifest.name)}
---
# {manifest.name}

Prepared for ONNX Runtime by ortprep {manifest.pipeline_version} at {manifest.created_at}.

- source: `{manifest.source.sha256}`
- spec: `{manifest.spec_digest}`{commit}

## Inputs and outputs

{tensors}

## Variants

| variant | target | figure | value |
|---|---|---|---|
{rows}
"""


def _describe_tensor(tensor: TensorSpec) -> str:
    shape = "of any shape" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]"
    return f"{tensor.dtype} {shape}"


def _hex(digest: str) -> str:
    return digest.removeprefix(PREFIX)


def _utc(created_at: str) -> str:
    return created_at.replace("+00:00", "Z")
