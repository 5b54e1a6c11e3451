"""What a pulled bundle knows of where it is from: enough to verify its signatures again, without a registry.

.registry/part.json      the part's document: it is what is signed, and it has the digests of all files
.registry/pulled.json    registry, reference, version and signatures; proves nothing by itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode, encode, format_json, read_json
from ortprep.bundle.digest import DigestCache, digest_file
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.paths import RECEIPT_FOLDER, resolve_inside
from ortprep.bundle.verification import (
    Digester,
    FileDifference,
    compare_files,
    find_added,
    raise_differences,
)
from ortprep.errors import BundleError
from ortprep.quoting import quoted
from ortprep.registry.documents import MAX_DOCUMENT_BYTES, Part, parse_part
from ortprep.registry.signatures import MAX_SIGNATURE_BYTES, PART_FILE, verify_part

_RECEIPT_FILE = f"{RECEIPT_FOLDER}/pulled.json"
_MAX_SIGNATURES = 32
_MAX_RECEIPT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class PullReceipt:
    """Where a bundle is from.

    Attributes:
        registry: Its URL without credentials.
        reference: What was asked for.
        version: Digest of the version.
        part: Digest of the part.
        signatures: What was attached to the part, as text; unverified.
    """

    registry: str
    reference: str
    version: str
    part: str
    signatures: tuple[str, ...] = ()


def write_receipt(folder: Path, receipt: PullReceipt, part: Part, signatures: Sequence[bytes]) -> None:
    """Writes the receipt of a bundle into its new, empty folder, with what is signed."""
    stored = [data for data in signatures if len(data) <= MAX_SIGNATURE_BYTES][:_MAX_SIGNATURES]
    texts = tuple(data.decode(errors="replace") for data in stored)
    (folder / RECEIPT_FOLDER).mkdir()
    (folder / _RECEIPT_FILE).write_bytes(format_json(encode(replace(receipt, signatures=texts))))
    (folder / PART_FILE).write_bytes(part.data)


def read_receipt(bundle: Path) -> PullReceipt:
    """Reads where a bundle is from.

    Raises:
        BundleError: It was not pulled from a registry, or the receipt is not of this form.
        IntegrityError: It leads out of the bundle.
    """
    path = resolve_inside(bundle, _RECEIPT_FILE)
    if not path.is_file():
        raise BundleError(
            f"not from a registry: {bundle}\n  expected {_RECEIPT_FILE} in it, got no such file",
            hint="ortprep pull NAME --out DIR",
        )
    return decode(PullReceipt, read_json(path, max_bytes=_MAX_RECEIPT_BYTES))


def verify_bundle(bundle: Path, public_key: Path, *, digest_cache: DigestCache | None = None) -> Part:
    """Returns the part that a pulled bundle is, byte for byte, and that was signed with a key.

    Without a digest cache every file is hashed.

    Raises:
        IntegrityError: A file is not what was signed; every difference is named.
        PipelineError: As `read_signed_part`.
    """
    receipt, part = read_signed_part(bundle, public_key)
    digest_of = digest_file if digest_cache is None else digest_cache.digest
    differences = find_differences(bundle, part, digest_of)
    raise_differences(bundle, differences, hint=f"ortprep pull {quoted(receipt.reference)} --out DIR")
    return part


def read_signed_part(bundle: Path, public_key: Path) -> tuple[PullReceipt, Part]:
    """Returns where a pulled bundle is from, and the part that was signed with a key.

    No file is compared with it.

    Raises:
        SignatureError: It is not signed with that key.
        BundleError: The bundle was not pulled from a registry, or cannot be read.
        MissingExtraError: model-signing is not installed.
    """
    receipt, path = read_receipt(bundle), resolve_inside(bundle, PART_FILE)
    try:
        with open_regular(path) as file:
            part = parse_part(file.read(MAX_DOCUMENT_BYTES + 1))
    except OSError as error:
        raise BundleError(f"cannot read {path}\n  {error.strerror or error}") from error
    signatures = receipt.signatures[:_MAX_SIGNATURES]
    verify_part(part, [text.encode(errors="replace") for text in signatures], public_key)
    return receipt, part


def find_differences(bundle: Path, part: Part, digest: Digester) -> tuple[FileDifference, ...]:
    """Returns the differences of a bundle from a part; raises BundleError if it cannot be read."""
    paths = sorted(find_added(bundle))
    added = (FileDifference(path, "added", "no such file", "a file") for path in paths)
    return (*compare_files(bundle, part.files, digest), *added)
