"""Signatures of parts by OpenSSF model-signing, and the receipt by which a pulled bundle is verified again.

The document of a part is signed. It names the model, the digest of its source, and path and digest of every
file. `model_signing verify key` checks the same signature of a pulled bundle's `.registry/part.json`.

.registry/part.json      the part's document
.registry/pulled.json    registry, reference, version and signatures; proves nothing by itself
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import canonical_json, decode, encode, format_json, parse_json, read_json
from ortprep.bundle.digest import PREFIX, digest_file
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.paths import RECEIPT_FOLDER, resolve_inside
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.bundle.verification import Digester, compare_bundle, raise_differences
from ortprep.errors import BundleError, MissingExtraError, PipelineError, SignatureError
from ortprep.quoting import quoted
from ortprep.registry.documents import MAX_DOCUMENT_BYTES, Part, parse_part
from ortprep.transport.time_limit import check_time
from ortprep.versions import install_command

PART_FILE = f"{RECEIPT_FOLDER}/part.json"
"""Where a pulled bundle keeps the document of its part."""

PASSWORD_VARIABLE = "ORTPREP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""

MAX_SIGNATURE_BYTES = 16 * 1024
"""Largest signature, in bytes, that is read; model-signing makes one of 1.3 KB."""

_MAX_PROBLEMS = 5
"""Largest number of signatures that a message describes: anybody may attach more."""

_RECEIPT_FILE = f"{RECEIPT_FOLDER}/pulled.json"
_MAX_SIGNATURES = 32
_MAX_RECEIPT_BYTES = 4 * 1024 * 1024

_PREDICATE = "https://model_signing/signature/v1.0"
_EXPECTED = f"another form of signature\n  expected {_PREDICATE}, with the key's name, got something else"


def sign_part(part: Part, private_key: Path, signatures: Iterable[bytes] = ()) -> bytes:
    """Returns a signature of a part by a key: the valid one of `signatures`, else a new one.

    It is a Sigstore bundle, as OpenSSF model-signing writes it; `signatures` may be anybody's.

    Raises:
        SignatureError: The key cannot be used.
        MissingExtraError: model-signing is not installed.
    """
    signing = _import_model_signing().signing
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    with _translated(f"cannot sign {part.model}"), _written(part) as file:
        target, public = file.with_suffix(".sig"), file.with_suffix(".pub")
        key = load_pem_private_key(private_key.read_bytes(), _password()).public_key()
        public.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        with suppress(SignatureError):
            return verify_part(part, signatures, public)
        # Annotated as text by model-signing 1.1, and handed on to where bytes are needed.
        config = signing.Config().use_elliptic_key_signer(private_key=private_key, password=_password())
        config.sign(file, target)
        return canonical_json(json.loads(target.read_bytes()))


def verify_part(part: Part, signatures: Iterable[bytes], public_key: Path) -> bytes:
    """Returns the first of several signatures of a part that was made with the key's private half.

    Raises:
        SignatureError: None was; the message says what is wrong with the first of them.
        MissingExtraError: model-signing is not installed.
    """
    problems = []
    for signature in signatures:
        check_time()
        try:
            _verify(part, signature, public_key)
            return signature
        except SignatureError as error:
            problems.append(error.message.partition("\n")[2] or error.message)
    got = "\n".join(problems[:_MAX_PROBLEMS]) or "  got none"
    raise SignatureError(
        f"no valid signature: {part.model} ({part.digest})\n  expected one by {public_key}\n{got}",
        hint="verify with the publisher's public key, or publish it signed: "
        "ortprep publish BUNDLE --sign PRIVATE_KEY",
    )


def _verify(part: Part, signature: bytes, public_key: Path) -> None:
    """Raises SignatureError unless a signature is of this part and by this key."""
    try:
        bundle = parse_json(signature[:MAX_SIGNATURE_BYTES], name="a signature")
    except BundleError as error:
        raise SignatureError("not a signature\n  expected a Sigstore bundle, got something else") from error
    _check_statement(part, bundle)
    verifying = _import_model_signing().verifying
    with _translated(f"signature of {part.model} is not valid"), _written(part) as file:
        source = file.with_suffix(".sig")
        source.write_text(json.dumps(bundle), encoding="utf-8")
        verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(file, source)


def _check_statement(part: Part, bundle: dict[str, Any]) -> None:
    """Refuses a statement that is not just the SHA-256 of the part's document, by a key that it names.

    model-signing also accepts statements of its first format, by unnamed keys, with other digests, and some
    that leave files out.
    """
    digest = part.digest.removeprefix(PREFIX)
    try:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True))
        is_named = bool(bundle["verificationMaterial"]["publicKey"]["hint"])
        serialization, resources = (statement["predicate"][name] for name in ("serialization", "resources"))
        is_plain = statement["predicateType"] == _PREDICATE and serialization["method"] == "files"
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SignatureError(_EXPECTED) from error
    if not is_named or not is_plain:
        raise SignatureError(_EXPECTED)
    if resources != [{"name": ".", "algorithm": "sha256", "digest": digest}]:
        raise SignatureError(f"signature of something else\n  expected {part.digest}, got {resources!r:.300}")


@contextmanager
def _written(part: Part) -> Iterator[Path]:
    with scratch_folder("ortprep-sign-") as folder:
        file = folder / "part.json"
        file.write_bytes(part.data)
        yield file


def _password() -> bytes | None:
    return os.environ.get(PASSWORD_VARIABLE, "").encode() or None


def _import_model_signing() -> Any:
    """Returns the library; raises MissingExtraError if it is not installed."""
    try:
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise MissingExtraError(
            "model-signing is not installed\n  expected it to sign and verify",
            hint=install_command("sign"),
        ) from error
    return model_signing


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turns every failure of model-signing, and of the libraries below it, into a SignatureError."""
    from cryptography.exceptions import InvalidSignature

    try:
        yield
    except PipelineError:
        raise
    except OSError as error:
        raise SignatureError(f"{what}\n  {error.strerror or error}: {error.filename}") from error
    except InvalidSignature as error:
        raise SignatureError(f"{what}\n  expected one by this key, got another, or a changed one") from error
    except Exception as error:  # of any library below model-signing: malformed keys, signatures, payloads
        hint = f"export {PASSWORD_VARIABLE}=…" if "assword" in str(error) else None
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise SignatureError(f"{what}\n  {reason}", hint=hint) from error


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
        MissingExtraError: model-signing is not installed.
    """
    receipt, part = read_receipt(bundle), read_pulled_part(bundle)
    signatures = receipt.signatures[:_MAX_SIGNATURES]
    verify_part(part, [text.encode(errors="replace") for text in signatures], public_key)
    return receipt, part
