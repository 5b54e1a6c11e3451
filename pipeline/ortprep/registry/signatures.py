"""Signatures of parts by elliptic-curve keys, and the receipt by which a pulled bundle is verified again.

The document of a part is signed, by ECDSA over its SHA-256. It names the model, the digest of its source, and
path and digest of every file. A signature is text, in base64: `openssl dgst -sha256 -verify` checks the same.

.registry/part.json      the part's document
.registry/pulled.json    registry, reference, version and signatures; proves nothing by itself
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode, format_json, read_json
from ortprep.bundle.digest import digest_file
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.paths import RECEIPT_FOLDER, resolve_inside
from ortprep.bundle.verification import Digester, compare_bundle, raise_differences
from ortprep.errors import BundleError, MissingExtraError, SignatureError
from ortprep.quoting import quoted
from ortprep.registry.documents import MAX_DOCUMENT_BYTES, Part, parse_part
from ortprep.transport.time_limit import check_time
from ortprep.versions import install_command

PART_FILE = f"{RECEIPT_FOLDER}/part.json"
"""Where a pulled bundle keeps the document of its part."""

PASSWORD_VARIABLE = "ORTPREP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""

MAX_SIGNATURE_BYTES = 1024
"""Largest signature, in bytes, that is looked at; that of P-521 has 188."""

_RECEIPT_FILE = f"{RECEIPT_FOLDER}/pulled.json"
_MAX_SIGNATURES = 32
_MAX_RECEIPT_BYTES = 4 * 1024 * 1024
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


def sign_part(part: Part, private_key: Path, signatures: Iterable[bytes] = ()) -> bytes:
    """Returns a signature of a part by a key: the valid one of `signatures`, else a new one.

    `signatures` may be anybody's.

    Raises:
        SignatureError: The key cannot be used.
        MissingExtraError: cryptography is not installed.
    """
    key = _read_key(private_key, f"cannot sign {part.model}", is_private=True)
    there = _find_valid(part, signatures, key.public_key())
    return there or base64.b64encode(key.sign(part.data, _algorithm()))


def verify_part(part: Part, signatures: Iterable[bytes], public_key: Path) -> bytes:
    """Returns the first of several signatures of a part that was made with the key's private half.

    Raises:
        SignatureError: None was, or the key cannot be read.
        MissingExtraError: cryptography is not installed.
    """
    signatures = tuple(signatures)
    problem = f"no valid signature: {part.model} ({part.digest})\n  expected one by {public_key}"
    valid = _find_valid(part, signatures, _read_key(public_key, problem, is_private=False))
    if valid is None:
        got = f"{len(signatures)} of something else, or by other keys" if signatures else "none"
        raise SignatureError(
            f"{problem}, got {got}",
            hint="verify with the publisher's public key, or publish it signed: "
            "ortprep publish BUNDLE --sign PRIVATE_KEY",
        )
    return valid


def _find_valid(part: Part, signatures: Iterable[bytes], public_key: Any) -> bytes | None:
    """Returns the first signature of a part that is by a key."""
    from cryptography.exceptions import InvalidSignature

    for signature in signatures:
        check_time()
        try:
            der = base64.b64decode(signature[:MAX_SIGNATURE_BYTES], validate=True)
            public_key.verify(der, part.data, _algorithm())
            return signature
        except (InvalidSignature, ValueError):  # of something else, or no signature at all
            continue
    return None


def _algorithm() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    return ec.ECDSA(SHA256())


def _read_key(file: Path, problem: str, *, is_private: bool) -> Any:
    """Returns the key in a file; raises SignatureError, with the problem, unless it is of a known curve."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise MissingExtraError(
            "cryptography is not installed\n  expected it to sign and verify", hint=install_command("sign")
        ) from error
    try:
        data = file.read_bytes()
        if is_private:
            password = os.environ.get(PASSWORD_VARIABLE, "").encode() or None
            key: Any = serialization.load_pem_private_key(data, password)
        else:
            key = serialization.load_pem_public_key(data)
        curve = getattr(getattr(key, "curve", None), "name", "another kind of key")
        if curve not in _CURVES:
            raise ValueError(f"expected one of {', '.join(_CURVES)}, got {curve}")
    except OSError as error:
        raise SignatureError(f"{problem}\n  {error.strerror or error}: {error.filename}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # malformed, or with a password
        hint = f"export {PASSWORD_VARIABLE}=…" if "assword" in str(error) else None
        if "not encrypted" in str(error):
            hint = f"unset {PASSWORD_VARIABLE}"
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise SignatureError(f"{problem}\n  cannot read the key: {reason}", hint=hint) from error
    return key


@dataclass(frozen=True)
class PullReceipt:
    """Origin of a pulled bundle.

    Attributes:
        registry: Its URL without credentials.
        reference: Requested reference.
        version: Digest of the version.
        part: Digest of the part.
        signatures: Signatures that were attached to the part, as text; unverified.
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
    path = Path(resolve_inside(bundle, _RECEIPT_FILE))
    if not path.is_file():
        raise BundleError(
            f"not from a registry: {bundle}\n  expected {_RECEIPT_FILE} in it, got no such file",
            hint="ortprep pull NAME --out DIR",
        )
    return decode(PullReceipt, read_json(path, max_bytes=_MAX_RECEIPT_BYTES))


def verify_bundle(bundle: Path, public_key: Path, digest: Digester = digest_file) -> Part:
    """Returns the part that a pulled bundle is, byte for byte, and that was signed with a key.

    `digest` may be a cache's; else every file is hashed.

    Raises:
        IntegrityError: A file is not what was signed; every difference is named.
        PipelineError: `read_signed_part` raises it.
    """
    receipt, part = read_signed_part(bundle, public_key)
    differences = compare_bundle(bundle, digest, entries=part.files)
    raise_differences(bundle, differences, hint=f"ortprep pull {quoted(receipt.reference)} --out DIR")
    return part


def read_pulled_part(bundle: Path) -> Part:
    """Returns the part that a pulled bundle says it is; raises BundleError if it says nothing of the kind."""
    path = resolve_inside(bundle, PART_FILE)
    try:
        with open_regular(path) as file:
            return parse_part(file.read(MAX_DOCUMENT_BYTES + 1))
    except OSError as error:
        raise BundleError(f"cannot read {path}\n  {error.strerror or error}") from error


def read_signed_part(bundle: Path, public_key: Path) -> tuple[PullReceipt, Part]:
    """Returns where a pulled bundle is from, and the part that was signed with a key.

    No file is compared with it.

    Raises:
        SignatureError: It is not signed with that key.
        BundleError: The bundle was not pulled from a registry, or cannot be read.
        MissingExtraError: cryptography is not installed.
    """
    receipt, part = read_receipt(bundle), read_pulled_part(bundle)
    signatures = receipt.signatures[:_MAX_SIGNATURES]
    verify_part(part, [text.encode(errors="replace") for text in signatures], public_key)
    return receipt, part
