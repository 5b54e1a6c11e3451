"""What a pulled bundle knows of where it is from: enough to verify its signatures again, without a registry.

.registry/pulled.json                          version, variants, and which records there are
.registry/records/KIND-HEX                     the version's record, its parts', their signatures
.registry/parts/HEX/{loader,manifest}.json     as each part was published
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.codec import decode, encode, format_json, read_json
from pipeline.bundle.digest import PREFIX, DigestCache, digest_file
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.paths import RECEIPT_FOLDER, resolve_inside
from pipeline.bundle.regular_file import open_regular
from pipeline.bundle.verification import Difference, Digester, compare_bundle, compare_file, raise_differences
from pipeline.errors import BundleError, IntegrityError
from pipeline.registry.composition import Composition, Part, compose, list_candidates
from pipeline.registry.parts import read_part, small_files
from pipeline.registry.records import (
    MAX_RECORD_BYTES,
    PartRecord,
    Record,
    RecordName,
    SignatureRecord,
    VersionRecord,
    decode_record,
)
from pipeline.registry.signatures import Method, verify_part

_RECEIPT_FILE = "pulled.json"
_MAX_RECEIPT_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Receipt:
    """Where a bundle is from.

    Attributes:
        registry: The registry's URL, without credentials.
        reference: What was asked for.
        version: Digest of the version.
        variants: Names of those that were pulled, in order.
        records: Names of the records that are kept beside it.
    """

    registry: str
    reference: str
    version: str
    variants: tuple[str, ...]
    records: tuple[str, ...]


def write_receipt(
    folder: Path,
    receipt: Receipt,
    records: Mapping[RecordName, bytes],
    small: Mapping[str, Mapping[str, Path]],
) -> None:
    """Writes the receipt of a bundle that is being put together.

    Args:
        folder: The bundle; nothing may be in the receipt's place.
        receipt: Where it is from.
        records: The records that `receipt` names, as they were written.
        small: By digest of a part: where its `loader.json` and `manifest.json` lie.

    Raises:
        OSError: The disk is full.
    """
    own = folder / RECEIPT_FOLDER
    (own / "records").mkdir(parents=True)
    _write_new(own / _RECEIPT_FILE, format_json(encode(receipt)))
    for name, data in records.items():
        _write_new(own / "records" / str(name), data)
    for digest, files in small.items():
        part = own / "parts" / digest.removeprefix(PREFIX)
        part.mkdir(parents=True)
        for path, source in files.items():
            _write_new(part / path, source.read_bytes())


def _write_new(path: Path, data: bytes) -> None:
    # Never through what stands there: it may be a link to another bundle's file.
    with path.open("xb") as file:
        file.write(data)


def has_receipt(bundle: Path) -> bool:
    """Says whether a bundle was pulled from a registry."""
    return (bundle / RECEIPT_FOLDER / _RECEIPT_FILE).is_file()


def read_receipt(bundle: Path) -> Receipt:
    """Reads where a bundle is from.

    Raises:
        BundleError: It was not pulled from a registry, or the receipt is not of this form.
        IntegrityError: It leads out of the bundle.
    """
    path = resolve_inside(bundle, f"{RECEIPT_FOLDER}/{_RECEIPT_FILE}")
    if not path.is_file():
        raise BundleError(
            f"not from a registry: {bundle}\n"
            f"  expected {RECEIPT_FOLDER}/{_RECEIPT_FILE} in it, got no such file",
            hint="ortprep pull NAME --out DIR",
        )
    return decode(Receipt, read_json(path, max_bytes=_MAX_RECEIPT_BYTES))


def verify_bundle(bundle: Path, method: Method, *, digest_cache: DigestCache | None = None) -> Receipt:
    """Checks that a pulled bundle is, byte for byte, made of parts that were signed as `method` says.

    Args:
        bundle: The bundle.
        method: What signature is accepted.
        digest_cache: Spares hashing files that did not change; None hashes all.

    Raises:
        SignatureError: A part is not signed so.
        IntegrityError: A file is not what was signed; every difference is named.
        BundleError: The bundle was not pulled from a registry, or cannot be read.
        MissingExtraError: model-signing is not installed.
    """
    receipt = read_receipt(bundle)
    records = _read_records(bundle, receipt)
    composition = compose_again(bundle, receipt, records)
    used = {candidate.part.digest: candidate.part for candidate in composition.candidates}
    signatures = [record for record in records.values() if isinstance(record, SignatureRecord)]
    for digest, part in used.items():
        own = [signature for signature in signatures if signature.part == digest]
        verify_part(part.record, digest, own, method)
    digest_of = digest_file if digest_cache is None else digest_cache.digest
    differences = list(_compare(bundle, composition, digest_of))
    raise_differences(bundle, tuple(differences), hint=f"ortprep pull {receipt.reference} --out DIR")
    raise_differences(bundle, compare_bundle(bundle, digest_of))
    return receipt


def _read_records(bundle: Path, receipt: Receipt) -> dict[RecordName, Record]:
    records = {}
    for text in receipt.records:
        name = RecordName.parse(text)
        if name is None:
            raise IntegrityError(f"no name of a record: {text[:80]!r} in the receipt of {bundle}")
        path = resolve_inside(bundle, f"{RECEIPT_FOLDER}/records/{name}")
        try:
            with open_regular(path) as file:
                data = file.read(MAX_RECORD_BYTES + 1)
        except OSError as error:
            raise BundleError(f"cannot read {path}\n  {error.strerror or error}") from error
        records[name] = decode_record(name, data)
    return records


def compose_again(bundle: Path, receipt: Receipt, records: Mapping[RecordName, Record]) -> Composition:
    """Returns what the parts of a receipt make, from what is kept of them."""
    versions = [record for record in records.values() if isinstance(record, VersionRecord)]
    parts = {name.digest: record for name, record in records.items() if isinstance(record, PartRecord)}
    if len(versions) != 1 or set(versions[0].parts) != set(parts):
        raise IntegrityError(f"the receipt of {bundle} lacks records of its version")
    candidates = list_candidates([_read_part(bundle, digest, part) for digest, part in sorted(parts.items())])
    by_name = {candidate.name: candidate for candidate in candidates}
    unknown = [name for name in receipt.variants if name not in by_name]
    if unknown or not receipt.variants:
        raise IntegrityError(
            f"the receipt of {bundle} names variants that its parts lack: {', '.join(unknown)}"
        )
    return compose([by_name[name] for name in receipt.variants])


def _read_part(bundle: Path, digest: str, record: PartRecord) -> Part:
    files = {}
    for path, entry in small_files(record).items():
        kept = f"{RECEIPT_FOLDER}/parts/{digest.removeprefix(PREFIX)}/{path}"
        difference = compare_file(bundle, FileEntry(kept, entry.size_bytes, entry.sha256))
        if difference is not None:
            raise_differences(bundle, (difference,))
        files[path] = resolve_inside(bundle, kept)
    return read_part(digest, record, files)


def _compare(bundle: Path, composition: Composition, digest: Digester) -> Iterator[Difference]:
    for path, _, entry in composition.files:
        difference = compare_file(bundle, FileEntry(path, entry.size_bytes, entry.sha256), digest)
        if difference is not None:
            yield difference
    for path, data in composition.written.items():
        got = resolve_inside(bundle, path)
        if not got.is_file() or got.read_bytes() != data:
            yield Difference(path, "content", "what its signed parts make", "something else")
