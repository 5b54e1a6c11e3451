"""Signatures of parts by OpenSSF model-signing, with an elliptic-curve key.

The document of a part is signed. It names the model, the digest of its source, and path and digest of every
file. `model_signing verify key` checks the same signature of a pulled bundle's `.registry/part.json`.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import canonical_json, parse_json
from ortprep.bundle.digest import PREFIX
from ortprep.bundle.paths import RECEIPT_FOLDER
from ortprep.errors import BundleError, MissingExtraError, PipelineError, SignatureError
from ortprep.registry.documents import Part
from ortprep.time_limit import check_time
from ortprep.versions import install_command

PART_FILE = f"{RECEIPT_FOLDER}/part.json"
"""Where a pulled bundle keeps the document of its part."""

PASSWORD_VARIABLE = "ORTPREP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""

MAX_SIGNATURE_BYTES = 1024 * 1024
"""Largest signature, in bytes, that is read."""

_MAX_PROBLEMS = 5
"""Largest number of signatures that a message describes: anybody may attach more."""

_PREDICATE = "https://model_signing/signature/v1.0"
_EXPECTED = f"another form of signature\n  expected {_PREDICATE}, with the key's name, got something else"


def sign_part(part: Part, private_key: Path) -> bytes:
    """Returns a signature of a part: a Sigstore bundle, as OpenSSF model-signing writes it.

    Raises:
        SignatureError: The key cannot be used.
        MissingExtraError: model-signing is not installed.
    """
    signing = _import_model_signing().signing
    with _translated(f"cannot sign {part.model}"), _written(part) as file:
        target = file.with_suffix(".sig")
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


def find_own_signature(part: Part, signatures: Iterable[bytes], private_key: Path) -> bytes | None:
    """Returns the first valid signature of a part by this key, None without one; raises as `sign_part`."""
    _import_model_signing()
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    with _translated(f"cannot sign {part.model}"), tempfile.TemporaryDirectory(prefix="ortprep-") as folder:
        public = load_pem_private_key(private_key.read_bytes(), _password()).public_key()
        file = Path(folder, "key.pub")
        file.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        with suppress(SignatureError):
            return verify_part(part, signatures, file)
        return None


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
    with tempfile.TemporaryDirectory(prefix="ortprep-") as folder:
        file = Path(folder, "part.json")
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
