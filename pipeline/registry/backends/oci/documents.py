"""What an OCI registry keeps of a bundle beside its files: manifests and indexes. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.bundle.codec import canonical_json
from pipeline.bundle.digest import PREFIX, digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.registry.records import PartRecord, PartVariant, RecordName, encode_record, record_digest
from pipeline.registry.state import Version

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
RECORD = "application/vnd.ortprep.record.v1+json"
BUNDLE = "application/vnd.ortprep.bundle.v1"
PART = "application/vnd.ortprep.part.v1+json"
VERSION = "application/vnd.ortprep.version.v1"
FILE = "application/octet-stream"

EMPTY = b"{}"
"""The configuration of a manifest that has none, after OCI 1.1."""

EMPTY_DIGEST = digest_bytes(EMPTY)
RESERVED = "ortprep-"
"""How our own tags begin; labels and aliases that begin so are not shown as tags."""

_TITLE = "org.opencontainers.image.title"
_CREATED = "org.opencontainers.image.created"
_OWN = "dev.ortprep."
_MAX_TAG_LENGTH = 128
_SHORT_HEX = 32
_MAX_INLINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Document:
    """A manifest or an index as it is pushed.

    Attributes:
        media_type: What it is.
        data: Its bytes.
        artifact_type: What it stands for.
        annotations: What it says of itself, repeated where it is listed.
    """

    media_type: str
    data: bytes
    artifact_type: str
    annotations: Mapping[str, str]

    @property
    def digest(self) -> str:
        """What names it."""
        return digest_bytes(self.data)

    def descriptor(self) -> dict[str, Any]:
        """Returns how an index lists it."""
        return {
            **_descriptor(self.media_type, self.digest, len(self.data)),
            "artifactType": self.artifact_type,
            "annotations": dict(self.annotations),
        }


def _descriptor(media_type: str, digest: str, size_bytes: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": size_bytes}


def _document(media_type: str, artifact_type: str, annotations: Mapping[str, str], **fields: Any) -> Document:
    content = {"schemaVersion": 2, "mediaType": media_type, "artifactType": artifact_type, **fields}
    if annotations:
        content["annotations"] = dict(annotations)
    return Document(media_type, canonical_json(content), artifact_type, annotations)


def record_tag(name: RecordName) -> str:
    """Returns the tag of a record's manifest."""
    return f"{RESERVED}{name}"


def record_document(name: RecordName, data: bytes) -> Document:
    """Returns the manifest of a record; a small one is in it, so that reading it takes one request."""
    layer = _descriptor(RECORD, name.digest, len(data))
    if len(data) <= _MAX_INLINE_BYTES:
        layer["data"] = base64.b64encode(data).decode()
    config = {
        **_descriptor("application/vnd.oci.empty.v1+json", EMPTY_DIGEST, len(EMPTY)),
        "data": base64.b64encode(EMPTY).decode(),
    }
    return _document(MANIFEST, RECORD, {}, config=config, layers=[layer])


def inline_record(name: RecordName, manifest: Mapping[str, Any]) -> bytes | None:
    """Returns the record that is in its manifest; None if it is not, or is another."""
    layers = manifest.get("layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    text = first.get("data") if isinstance(first, dict) else None
    if not isinstance(text, str):
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if digest_bytes(data) == name.digest else None


def target_prefix(part: str) -> str:
    """Returns how the tags of a part's targets begin, given the part's digest."""
    return f"{RESERVED}target-{part.removeprefix(PREFIX)[:_SHORT_HEX]}-"


def target_tag(part: str, target: str) -> str:
    """Returns the tag of one target of a part; of a name too long for a tag, its digest."""
    prefix = target_prefix(part)
    if len(prefix) + len(target) > _MAX_TAG_LENGTH:
        target = digest_bytes(target.encode()).removeprefix(PREFIX)[:_SHORT_HEX]
    return prefix + target


def target_documents(part: PartRecord) -> dict[str, Document]:
    """Returns the manifests of a part's targets by tag: what other tools pull a bundle for one machine by."""
    name, data = encode_record(part)
    targets = sorted({variant.target for variant in part.variants})
    return {
        target_tag(name.digest, target): _target_document(part, target, name.digest, len(data))
        for target in targets
    }


def _target_document(part: PartRecord, target: str, digest: str, size_bytes: int) -> Document:
    variants = [variant for variant in part.variants if variant.target == target]
    annotations = {
        _CREATED: part.created_at,
        _OWN + "target": target,
        _OWN + "onnxruntime": _join(variant.onnxruntime for variant in variants),
        _OWN + "providers": _join(provider for variant in variants for provider in variant.providers),
        _OWN + "hardware": _join(variant.hardware for variant in variants),
        _OWN + "source": part.source,
        _OWN + "spec": part.spec,
    }
    layers = [
        {**_descriptor(FILE, entry.sha256, entry.size_bytes), "annotations": {_TITLE: entry.path}}
        for entry in _files_of(part, variants)
    ]
    return _document(
        MANIFEST, BUNDLE, annotations, config=_descriptor(PART, digest, size_bytes), layers=layers
    )


def _join(texts: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(text for text in texts if text))


def _files_of(part: PartRecord, variants: Iterable[PartVariant]) -> list[FileEntry]:
    """Returns the files of some variants, and those of no variant at all."""
    others = {variant.name for variant in part.variants} - {variant.name for variant in variants}
    return [
        entry for entry in part.files if entry.path.partition("/")[0] not in others or "/" not in entry.path
    ]


def version_document(version: Version, parts: Mapping[str, PartRecord]) -> Document:
    """Returns the index of a version: the manifests of its parts' targets."""
    record = version.record
    manifests = [
        document.descriptor()
        for part in record.parts
        for _, document in sorted(target_documents(parts[part]).items())
    ]
    annotations = {
        _CREATED: version.created_at,
        _OWN + "version": record_digest(record),
        _OWN + "source": record.source,
        _OWN + "spec": record.spec,
    }
    return _document(INDEX, VERSION, annotations, manifests=manifests)
