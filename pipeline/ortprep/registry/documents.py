"""The documents of a registry: parts and versions as OCI manifests and indexes. Pure.

They have the same bytes in every kind of registry, so a digest names the same version in all of them. The
parsers here check kind and bounds of untrusted documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ortprep.bundle.codec import canonical_json, decode, encode, parse_json
from ortprep.bundle.digest import PREFIX, digest_bytes, digest_json, is_digest
from ortprep.bundle.loader_config import FileEntry, Requirements, check_file_entries, find_faults
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import BundleError, IntegrityError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
PART_TYPE = "application/vnd.ortprep.part.v1"
VERSION_TYPE = "application/vnd.ortprep.version.v1"
SIGNATURE_TYPE = "application/vnd.ortprep.signature.v1"
FILE_TYPE = "application/octet-stream"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
"""What stands for the configuration, or the layers, of a manifest without them, by OCI 1.1."""

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Largest document, in bytes: OCI registries need not take larger manifests."""

MAX_FILE_BYTES = 2**44
"""Largest file, in bytes, that a document may name."""

TITLE = "org.opencontainers.image.title"
FULL_DIGEST = re.compile(r"(sha256:)?[0-9a-f]{64}")
LIKE_DIGEST = re.compile(r"(?![0-9]{7,63}$)[0-9a-fA-F]{7,}")
"""What people take for a shortened digest; a date or a number is none."""

_RECORD = "dev.ortprep.record"
_OCI_KEYS = {
    "model": TITLE,
    "label": "org.opencontainers.image.version",
    "created_at": "org.opencontainers.image.created",
    "published_at": "org.opencontainers.image.created",
}
"""Annotations that other tools show, by the fields that they say."""

_MAX_PARTS = 1000


@dataclass(frozen=True)
class Descriptor:
    """A reference of an OCI document to content; `size` is in bytes."""

    digest: str
    size: Any
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        _check_size(self.size)


@dataclass(frozen=True)
class OciDocument:
    """The fields of an OCI manifest or index that are read."""

    artifactType: str  # noqa: N815 - OCI's name
    annotations: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()
    subject: Descriptor | None = None


@dataclass(frozen=True)
class PartVariant:
    """One variant of a part: what listings show, and what decides which part fits a machine.

    Attributes:
        onnxruntime: Version of ONNX Runtime that it was prepared with.
        gpu: Name of the GPU that it was prepared on; "" if it needs none, or the name is not known.
        requirements: Required properties of the machine.
    """

    name: str
    target: str
    onnxruntime: str
    gpu: str
    requirements: Requirements

    def __post_init__(self) -> None:
        _check_names(self.name, self.target)
        for fault in find_faults(self.requirements):
            raise BundleError(f"bad variant in a document\n  {fault}")

    @property
    def hardware(self) -> str:
        """What it runs on, in words; "" for anywhere."""
        needs = self.requirements
        if needs.compute_capability is not None:
            gpu = f"{self.gpu}, " if self.gpu else ""
            return f"{gpu}compute capability {'.'.join(map(str, needs.compute_capability.minimum))}"
        if needs.machine is None and not needs.cpu_features:
            return ""
        return f"{needs.machine or 'any'} with {', '.join(needs.cpu_features[:3]) or 'no extensions'}"


@dataclass(frozen=True)
class PartSummary:
    """The record of a part in a version.

    Attributes:
        created_at: Time of the preparation, ISO 8601, UTC.
        built_on: Digest of the hardware and the ONNX Runtime that it was prepared with: a newer part with the
            same takes its place.
        machine: Processor architecture it was prepared on, as OCI spells it; "" if unknown.
    """

    digest: str
    document_bytes: int
    created_at: str
    built_on: str
    machine: str
    size_bytes: int
    variants: tuple[PartVariant, ...]

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        _check_digest(self.built_on)
        _check_size(self.document_bytes)
        _check_size(self.size_bytes)


@dataclass(frozen=True)
class Part:
    """A bundle as one machine published it; equal bundles are equal parts.

    Attributes:
        summary: Its record in versions.
        source: Digest of the files it was prepared from: the model and its external data.
        spec: Digest of the resolved spec.
        files: Every file that is pulled.
    """

    summary: PartSummary
    data: bytes
    model: str
    source: str
    spec: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        _check_names(self.model)
        _check_digest(self.source)
        _check_digest(self.spec)
        check_file_entries(self.files, name="a part")
        _check_paths([PurePosixPath(entry.path) for entry in self.files])

    @property
    def digest(self) -> str:
        """Its digest, which identifies it."""
        return self.summary.digest


@dataclass(frozen=True)
class Version:
    """Parts of the same source and spec, identified by the digest of the document.

    Attributes:
        label: Its human name, which never moves, since it is in the document.
        published_at: Time of publication, ISO 8601, UTC.
    """

    digest: str
    data: bytes
    model: str
    label: str
    source: str
    spec: str
    published_at: str
    parts: tuple[PartSummary, ...]

    def __post_init__(self) -> None:
        _check_names(self.model)
        _check_names(self.label, unlike=LIKE_DIGEST)
        _check_digest(self.source)
        _check_digest(self.spec)
        if not 0 < len(self.parts) <= _MAX_PARTS or len(self.part_digests) != len(self.parts):
            got = len(self.parts)
            raise IntegrityError(f"bad version\n  expected 1 to {_MAX_PARTS} parts, each once, got {got}")

    @property
    def family(self) -> tuple[str, str]:
        """Source and spec, which all parts of a version share."""
        return self.source, self.spec

    @property
    def part_digests(self) -> frozenset[str]:
        """Digests of its parts."""
        return frozenset(part.digest for part in self.parts)


def build_version(
    model: str,
    parts: Iterable[Part],
    *,
    label: str | None,
    published_at: str,
) -> Version:
    """Returns the version of these parts, at least one, all of one source and spec.

    Without a label it is called after the day and the digest of its other fields.
    """
    ordered = sorted(parts, key=lambda part: part.digest)
    origin = {"model": model, "source": ordered[0].source, "spec": ordered[0].spec}
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "artifactType": VERSION_TYPE,
        "manifests": [_describe_part(part.summary) for part in ordered],
        "annotations": annotate(**origin, published_at=published_at),
    }
    if label is None:
        label = f"{published_at[:10]}.{digest_json(document).removeprefix(PREFIX)[:8]}"
    document["annotations"] |= annotate(**origin, published_at=published_at, label=label)
    return parse_version(canonical_json(document))


def _describe_part(part: PartSummary) -> dict[str, Any]:
    """Returns the descriptor of a part in the document of a version."""
    names = ("created_at", "built_on", "machine", "size_bytes", "variants")
    return {
        **describe_content(MANIFEST, part.digest, part.document_bytes),
        "artifactType": PART_TYPE,
        "platform": {"architecture": part.machine or "unknown", "os": "linux"},
        "annotations": annotate(**{name: getattr(part, name) for name in names}),
    }


def annotate(**fields: Any) -> dict[str, str]:
    """Returns annotations that say what fields are: those that OCI names, and one with the rest, in JSON."""
    own = {name: encode(value) for name, value in fields.items() if name not in _OCI_KEYS}
    named = {key: fields[name] for name, key in _OCI_KEYS.items() if name in fields}
    return named | {_RECORD: canonical_json(own).decode()}


def _read_fields(annotations: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields that annotations have, unchecked; raises BundleError if ours are no JSON."""
    own = parse_json(annotations.get(_RECORD, "").encode(), name="an annotation")
    return own | {name: annotations[key] for name, key in _OCI_KEYS.items() if key in annotations}


def as_mapping(value: object) -> Mapping[str, Any]:
    """Returns a mapping, an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def describe_content(media_type: str, digest: str, size_bytes: int) -> dict[str, Any]:
    """Returns how OCI refers to content."""
    return {"mediaType": media_type, "digest": digest, "size": size_bytes}


def build_manifest(kind: str, layers: Iterable[Mapping[str, Any]], **fields: object) -> bytes:
    """Returns an OCI image manifest with an empty configuration; `kind` is its artifact type."""
    empty = describe_content(EMPTY_TYPE, digest_bytes(EMPTY), len(EMPTY))
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "config": empty}
    return canonical_json({**manifest, "layers": list(layers) or [empty], **fields})


def build_signature(part: Part, data: bytes) -> bytes:
    """Returns the document of a signature, which is text, of a part, in OCI 1.1's terms."""
    subject = describe_content(MANIFEST, part.digest, len(part.data))
    return build_manifest(SIGNATURE_TYPE, [], subject=subject, annotations={_RECORD: data.decode()})


def parse_signature(data: bytes) -> tuple[str, bytes]:
    """Returns the digest of the part that an untrusted document is about, and the signature, unverified.

    Raises as `parse_part`.
    """
    document = parse_document(data, SIGNATURE_TYPE)
    content = document.annotations.get(_RECORD)
    if document.subject is None or content is None:
        raise BundleError("bad document\n  expected the signature of a part")
    return document.subject.digest, content.encode()


def parse_document(data: bytes, kind: str) -> OciDocument:
    """Parses an untrusted OCI manifest or index, and checks the digests and sizes in it.

    Raises:
        IntegrityError: It is too large, or has an invalid digest or size.
        BundleError: It is not a document of that kind.
    """
    document = decode(OciDocument, parse_object(data), where="a document")
    if document.artifactType != kind:
        raise BundleError(f"wrong kind of document\n  expected {kind}, got another")
    return document


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses an untrusted JSON object.

    Raises:
        IntegrityError: It is too large.
        BundleError: It is not a JSON object.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise IntegrityError(f"document too large\n  expected at most {MAX_DOCUMENT_BYTES} bytes")
    try:
        fields = parse_json(data, name="a document")
        canonical_json(fields)  # what cannot be written cannot be kept beside a bundle either
    except (RecursionError, ValueError) as error:
        raise BundleError(f"not a document\n  {type(error).__name__}") from error
    return fields


def _check_digest(value: str) -> None:
    if not is_digest(value):
        raise IntegrityError("bad digest in a document\n  expected sha256: and 64 digits")


def _check_size(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_FILE_BYTES:
        raise IntegrityError(f"bad size in a document\n  expected 0 to {MAX_FILE_BYTES} bytes")


def _check_names(*names: str, unlike: re.Pattern[str] = FULL_DIGEST) -> None:
    """Raises IntegrityError unless texts are names, and no digests."""
    for name in names:
        if not is_safe_name(name) or unlike.fullmatch(name):
            raise IntegrityError(f"bad name in a document\n  got {name[:80]!r}")


def parse_part(data: bytes) -> Part:
    """Parses the untrusted document of a part.

    Raises:
        IntegrityError: It is too large, or has an unsafe path or an invalid digest.
        BundleError: It is not a part.
    """
    document = parse_document(data, PART_TYPE)
    files = [
        {"path": layer.annotations.get(TITLE), "size_bytes": layer.size, "sha256": layer.digest}
        for layer in document.layers
    ]
    fields = _read_fields(document.annotations)
    size_bytes = sum(layer.size for layer in document.layers)
    summary = fields | {"digest": digest_bytes(data), "document_bytes": len(data), "size_bytes": size_bytes}
    return decode(Part, fields | {"summary": summary, "data": data, "files": files}, where="a part")


def parse_version(data: bytes) -> Version:
    """Parses the untrusted document of a version.

    Raises:
        IntegrityError: It is too large, or has a value that `publish` never writes.
        BundleError: It is not a version.
    """
    document = parse_document(data, VERSION_TYPE)
    parts = [
        _read_fields(one.annotations) | {"digest": one.digest, "document_bytes": one.size}
        for one in document.manifests
    ]
    fields = _read_fields(document.annotations)
    return decode(
        Version, fields | {"digest": digest_bytes(data), "data": data, "parts": parts}, where="a version"
    )


def _check_paths(paths: list[PurePosixPath]) -> None:
    """Raises if files overlap each other, or what a puller writes, or are hidden."""
    files = frozenset(paths)
    if len(files) != len(paths):
        raise IntegrityError("a path is listed twice in a part")
    for path in paths:
        if any(part.startswith(".") for part in path.parts) or not files.isdisjoint(path.parents):
            raise IntegrityError(
                f"conflicting path: {str(path)!r} in a part\n"
                "  expected no name that begins with '.', and none below another file"
            )
