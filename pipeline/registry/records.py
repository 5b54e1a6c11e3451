"""What a registry remembers: small JSON documents that never change, each named by its digest.

Everything a registry means (which versions there are, what a label or an alias names) is computed from the
set of these records by `state.fold`. Nothing is ever overwritten, so publishers that write at the same time
cannot lose each other's work, and any store that keeps files can be a registry.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from pipeline.bundle.codec import canonical_json, decode, encode, parse_json
from pipeline.bundle.digest import PREFIX, digest_bytes, is_digest
from pipeline.bundle.loader_config import FileEntry, check_file_entries
from pipeline.bundle.paths import RECEIPT_FOLDER, is_safe_name
from pipeline.errors import BundleError, IntegrityError, UnsupportedVersionError

RECORD_SCHEMA_VERSION = "1.0"
MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Largest record, in bytes, that is written or read: OCI registries need not take larger manifests."""

MAX_RECORDS = 20_000
"""Most records of one model that are read."""

MAX_ALL_RECORDS_BYTES = 256 * 1024 * 1024
"""Most bytes of records of one model that are read, together."""

PASSING = frozenset({"reservation", "collection"})
"""Kinds of records that are soon gone again."""

FULL_DIGEST = re.compile(r"(sha256:)?[0-9a-f]{64}")
"""What is a version's digest and therefore no label and no alias."""

_NAME = re.compile(r"([a-z]{1,20})-([0-9a-f]{64})")


@dataclass(frozen=True, order=True)
class RecordName:
    """What a record is filed under.

    Attributes:
        kind: `part`, `version`, `claim`, `label`, `alias`, `signature`, `reservation` or `collection`.
        digest: Of its bytes, `sha256:<hex>`.
    """

    kind: str
    digest: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.digest.removeprefix(PREFIX)}"

    @classmethod
    def parse(cls, text: str) -> RecordName | None:
        """Returns the name that `str` wrote, None for any other text."""
        found = _NAME.fullmatch(text)
        return cls(found[1], PREFIX + found[2]) if found and found[1] in KINDS else None


@dataclass(frozen=True)
class PartVariant:
    """One variant of a part, as catalogues show it; what a machine must have is in the part's `loader.json`.

    Attributes:
        name: Of the variant in its bundle.
        target: What it was prepared for.
        onnxruntime: Version it was prepared with.
        providers: Execution providers it needs, in order.
        hardware: Processor or GPU it was prepared on, in words; "" if it runs anywhere.
    """

    name: str
    target: str
    onnxruntime: str
    providers: tuple[str, ...]
    hardware: str


@dataclass(frozen=True)
class PartRecord:
    """A bundle as one machine published it: nothing but what the bundle says, so it is equal each time.

    Attributes:
        model: Name of the model.
        source: Digest of the model it was prepared from.
        spec: Digest of the resolved spec.
        created_at: When it was prepared, ISO 8601, UTC.
        files: Every file of the bundle, `manifest.json` and `loader.json` included.
        variants: What is in it.
    """

    kind: ClassVar[str] = "part"
    model: str
    source: str
    spec: str
    created_at: str
    files: tuple[FileEntry, ...]
    variants: tuple[PartVariant, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.size_bytes for entry in self.files)


@dataclass(frozen=True)
class VersionRecord:
    """A version: parts of the same source and spec. Its digest names it.

    Attributes:
        model: Name of the model.
        source: Digest of the model it was prepared from.
        spec: Digest of the resolved spec.
        parts: Digests of its parts' records, sorted.
    """

    kind: ClassVar[str] = "version"
    model: str
    source: str
    spec: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class ClaimRecord:
    """A publisher wants a label for a version; who sees another version's claim leaves the label alone."""

    kind: ClassVar[str] = "claim"
    label: str
    version: str


@dataclass(frozen=True)
class LabelRecord:
    """A label names a version, from now on and for ever; written only after an uncontested claim.

    Attributes:
        label: The label.
        version: Digest of the version.
        at: When it was published, ISO 8601, UTC.
        by: Who published it, "" unless the user asked to have it recorded.
        host: On which machine, likewise.
    """

    kind: ClassVar[str] = "label"
    label: str
    version: str
    at: str
    by: str = ""
    host: str = ""


@dataclass(frozen=True)
class AliasRecord:
    """An alias was moved.

    Attributes:
        alias: The alias.
        action: `promote`, or `rollback` to what it named before.
        version: Digest of the version it names then.
        sequence: Number of the move, from 1 on; of moves with one number, the larger digest is the later.
        at: When, ISO 8601, UTC.
        reason: Why, in the user's words; always given when forced.
        forced: What the gate objected to, when it was overruled.
        by: Who did it, "" unless the user asked to have it recorded.
    """

    kind: ClassVar[str] = "alias"
    alias: str
    action: str
    version: str
    sequence: int
    at: str
    reason: str = ""
    forced: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True)
class SignatureRecord:
    """A signature over a part's files.

    Attributes:
        part: Digest of the part's record.
        bundle: A Sigstore bundle, as OpenSSF model-signing writes it.
    """

    kind: ClassVar[str] = "signature"
    part: str
    bundle: Mapping[str, Any]


@dataclass(frozen=True)
class ReservationRecord:
    """Somebody is about to rely on what is there; a collection that sees it leaves it alone.

    Attributes:
        source: Digest of the source model of the parts and versions that are relied on.
        spec: Digest of their spec.
        files: Digests of files that are relied on, whatever parts they belong to.
        expires_at: Seconds since 1970 after which whoever wrote it is taken for dead.
        nonce: Makes each writer's record its own.
    """

    kind: ClassVar[str] = "reservation"
    source: str
    spec: str
    files: tuple[str, ...]
    expires_at: float
    nonce: str


@dataclass(frozen=True)
class CollectionRecord:
    """A collection is about to remove something; whoever is about to rely on anything waits until it is done.

    Attributes:
        begun_at: When, in seconds since 1970.
        nonce: Makes each collection's record its own.
    """

    kind: ClassVar[str] = "collection"
    begun_at: float
    nonce: str


Record = (
    PartRecord
    | VersionRecord
    | ClaimRecord
    | LabelRecord
    | AliasRecord
    | SignatureRecord
    | ReservationRecord
    | CollectionRecord
)

KINDS: Mapping[str, type[Record]] = {
    kind.kind: kind
    for kind in (
        PartRecord,
        VersionRecord,
        ClaimRecord,
        LabelRecord,
        AliasRecord,
        SignatureRecord,
        ReservationRecord,
        CollectionRecord,
    )
}


def encode_record(record: Record) -> tuple[RecordName, bytes]:
    """Returns a record's name and bytes: canonical JSON, so that equal records are equal files.

    Raises:
        BundleError: It is larger than readers accept.
    """
    data = canonical_json({"schema_version": RECORD_SCHEMA_VERSION, **encode(record)})
    if len(data) > MAX_RECORD_BYTES:
        raise BundleError(
            f"record too large: {record.kind}\n  expected at most {MAX_RECORD_BYTES} bytes, got {len(data)}"
        )
    return RecordName(record.kind, digest_bytes(data)), data


def record_digest(record: Record) -> str:
    """Returns the digest that names a record."""
    return encode_record(record)[0].digest


def file_records(records: Iterable[Record]) -> dict[RecordName, Record]:
    """Returns records by the names they are written under."""
    return {encode_record(record)[0]: record for record in records}


def decode_record(name: RecordName, data: bytes) -> Record:
    """Builds a record from bytes that came from outside.

    Raises:
        IntegrityError: The bytes are not those the name stands for, or name a path outside a bundle.
        BundleError: They are no record of that kind.
        UnsupportedVersionError: They are of a newer major version.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(f"record too large: {name}\n  expected at most {MAX_RECORD_BYTES} bytes")
    got = digest_bytes(data)
    if got != name.digest:
        raise IntegrityError(f"record is not what its name says: {name}\n  expected {name.digest}, got {got}")
    fields = parse_json(data, name=str(name))
    major = str(fields.get("schema_version", "")).partition(".")[0]
    if not major.isdecimal() or int(major[:9]) > int(RECORD_SCHEMA_VERSION.partition(".")[0]):
        shown = repr(fields.get("schema_version"))[:80]
        raise UnsupportedVersionError(
            f"record too new: {name}\n  expected schema_version up to {RECORD_SCHEMA_VERSION}, got {shown}",
            hint="pip install --upgrade ortprep",
        )
    try:
        record: Record = decode(KINDS[name.kind], fields, where=str(name))
        encode_record(record)  # what cannot be written cannot be kept beside a bundle either
    except (RecursionError, ValueError) as error:
        raise BundleError(f"no record: {name}\n  {type(error).__name__}") from error
    _check_record(record, name=str(name))
    return record


def _check_record(record: Record, *, name: str) -> None:
    if isinstance(record, PartRecord):
        check_file_entries(record.files, name=name)
        _check_paths([PurePosixPath(entry.path) for entry in record.files], name=name)
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in ("source", "spec", "version", "part") and not is_digest(value):
            raise IntegrityError(
                f"bad digest: {field.name} of {name}\n  expected sha256: and 64 digits, got {value[:80]!r}"
            )
        if field.name in ("model", "label", "alias") and not is_safe_name(value):
            raise IntegrityError(f"bad name: {field.name} of {name}\n  got {value[:80]!r}")
        if field.name in ("label", "alias") and FULL_DIGEST.fullmatch(value):
            raise IntegrityError(f"a digest as a name: {field.name} of {name}\n  got {value!r}")
    if isinstance(record, VersionRecord) and not all(is_digest(part) for part in record.parts):
        raise IntegrityError(f"bad digest among the parts of {name}")


def _check_paths(paths: list[PurePosixPath], *, name: str) -> None:
    """Raises unless files can lie beside each other, and beside what a puller writes."""
    files = frozenset(paths)
    if len(files) != len(paths):
        raise IntegrityError(f"a path is listed twice in {name}")
    for path in paths:
        if path.parts[0] == RECEIPT_FOLDER or not files.isdisjoint(path.parents):
            raise IntegrityError(
                f"a file in the way of another: {str(path)!r} in {name}\n"
                f"  expected none in {RECEIPT_FOLDER}, and none below another file"
            )
