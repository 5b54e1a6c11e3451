"""Signatures by OpenSSF model-signing, and their verification.

A signature covers every file of a part by path and digest, as `model_signing sign` of the pulled folder
would, without its receipt. Digests are checked when files are transferred, so no file is read again here.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import canonical_json, encode, parse_json
from ortprep.bundle.digest import PREFIX, digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import RECEIPT_FOLDER
from ortprep.errors import BundleError, MissingExtraError, PipelineError, SignatureError
from ortprep.registry.alias_moves import Move
from ortprep.registry.documents import Part, Version
from ortprep.registry.signature_methods import (
    PASSWORD_VARIABLE,
    SIGNERS,
    VERIFIERS,
    SignatureMethod,
    describe_method,
)
from ortprep.versions import install_command

PART_FILE = f"{RECEIPT_FOLDER}/part.json"
"""Where a pulled bundle keeps the document of its part."""

MAX_SIGNATURE_BYTES = 1024 * 1024
"""Largest signature, in bytes, that is read."""

_PREDICATE = "https://model_signing/signature/v1.0"
_SERIALIZATION = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}


@dataclass(frozen=True)
class SignatureSubject:
    """Files that are signed together, by path and digest, under a name."""

    name: str
    files: tuple[FileEntry, ...]


def subject_of(document: Part | Version) -> SignatureSubject:
    """Returns what is signed: the files of a part and its document, or the document of a version."""
    name = PART_FILE if isinstance(document, Part) else "version.json"
    files = document.files if isinstance(document, Part) else ()
    return SignatureSubject(document.model, (*files, FileEntry(name, len(document.data), document.digest)))


def move_subject(model: str, move: Move) -> SignatureSubject:
    """Returns what the signature of a move covers: all of it, and the model."""
    data = canonical_json([model, encode(replace(move, signature=None))])
    return SignatureSubject(model, (FileEntry("alias.json", len(data), digest_bytes(data)),))


def sign(subject: SignatureSubject, method: SignatureMethod) -> bytes:
    """Returns a signature: a Sigstore bundle, as OpenSSF model-signing writes it.

    Raises:
        SignatureError: The key cannot be used.
        MissingExtraError: model-signing is not installed.
    """
    signing = _import_model_signing().signing
    options = dict(method.options)
    if method.kind == "key":
        # Annotated as text by model-signing 1.1, and handed on to where bytes are needed.
        options["password"] = _password()
    with tempfile.TemporaryDirectory(prefix="ortprep-") as folder:
        target = Path(folder) / "model.sig"
        with _translated(f"cannot sign {subject.name}", method):
            config = getattr(signing.Config(), SIGNERS[method.kind].function)(**options)
            config.set_hashing_config(_known_digests(subject)).sign(folder, target)
        return canonical_json(json.loads(target.read_bytes()))


def verify_subject(subject: SignatureSubject, signatures: Iterable[bytes], method: SignatureMethod) -> None:
    """Checks that at least one of several signatures of a subject is valid by `method`.

    Raises:
        SignatureError: None is valid; the message says what is wrong with each.
        MissingExtraError: model-signing is not installed.
    """
    problems = []
    for signature in signatures:
        try:
            return _verify(subject, signature, method)
        except SignatureError as error:
            problems.append(error.message.partition("\n")[2] or error.message)
    got = "\n".join(problems) or "  got none"
    raise SignatureError(
        f"no valid signature: {subject.name}\n  expected one by {describe_method(method)}\n{got}",
        hint="ortprep publish BUNDLE --sign KEY   (with the private key)",
    )


def _verify(subject: SignatureSubject, signature: bytes, method: SignatureMethod) -> None:
    try:
        bundle = parse_json(signature[:MAX_SIGNATURE_BYTES], name="a signature")
    except BundleError as error:
        raise SignatureError("signature is not of this form\n  expected a Sigstore bundle") from error
    statement = _read_statement(bundle)
    if method.kind == "certificate" and not method.options.get("certificate_chain"):
        raise SignatureError("no authority to trust\n  expected the certificate chain of one, got none")
    verifying = _import_model_signing().verifying
    what = f"signature of {subject.name} is not valid"
    with (
        tempfile.TemporaryDirectory(prefix="ortprep-") as folder,
        _translated(what, method, _list_differences(subject, statement)),
    ):
        source = Path(folder) / "model.sig"
        source.write_text(json.dumps(bundle), encoding="utf-8")
        config = getattr(verifying.Config(), VERIFIERS[method.kind].function)(**method.options)
        config.set_hashing_config(_known_digests(subject)).verify(Path(folder), source)
        if method.kind == "certificate":
            _check_certificate(bundle, method.subject)


def _check_certificate(bundle: Mapping[str, Any], subject: str) -> None:
    """Raises unless the verified certificate has that name."""
    from cryptography import x509

    first = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][0]
    names = _names_in(x509.load_der_x509_certificate(base64.b64decode(first["rawBytes"])))
    if subject not in names:
        raise ValueError(f"expected a certificate of {subject}, got one of {', '.join(names) or 'nobody'}")


def _names_in(certificate: Any) -> list[str]:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    names = [
        str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    ]
    with suppress(x509.ExtensionNotFound):
        alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for kind in (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier):
            names += alternative.get_values_for_type(kind)
    return names


def _read_statement(bundle: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the unverified statement of a signature; refuses weak ones that model-signing accepts."""
    try:
        material = bundle["verificationMaterial"]
        statement: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        predicate = statement["predicate"] if statement["predicateType"] == _PREDICATE else {}
        serialization = {name: predicate["serialization"][name] for name in ("method", "hash_type")}
        names_key = "publicKey" not in material or bool(material["publicKey"]["hint"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SignatureError(
            f"signature is not of this form\n  expected {_PREDICATE}, got another"
        ) from error
    if serialization != {"method": "files", "hash_type": "sha256"} or not names_key:
        raise SignatureError(
            "signature is incomplete\n  expected the SHA-256 of every file and the key that signed"
        )
    return statement


def _list_differences(subject: SignatureSubject, statement: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns every difference between what is signed and what should be, in words."""
    resources = statement["predicate"].get("resources")
    listed = (
        [resource for resource in resources if isinstance(resource, dict)]
        if isinstance(resources, list)
        else []
    )
    signed = {str(resource.get("name")): PREFIX + str(resource.get("digest")) for resource in listed}
    recorded = {entry.path: entry.sha256 for entry in subject.files}
    return tuple(
        f"{path}: content: signed {signed.get(path, 'nothing')}, got {recorded.get(path, 'no such file')}"
        for path in sorted(signed.keys() | recorded.keys())
        if signed.get(path) != recorded.get(path)
    )


def is_signed_by(subject: SignatureSubject, signatures: Iterable[bytes], signer: SignatureMethod) -> bool:
    """Says whether a subject has a valid signature by this signer; False for signers without a local key."""
    if signer.kind not in ("key", "certificate"):
        return False
    _import_model_signing()
    with _translated(f"cannot sign {subject.name}", signer), tempfile.TemporaryDirectory() as folder:
        verifier = _verifier_of(signer, Path(folder))
        try:
            verify_subject(subject, signatures, verifier)
        except SignatureError:
            return False
        return True


def _verifier_of(signer: SignatureMethod, folder: Path) -> SignatureMethod:
    """Returns the verifier for a signer with a key or a certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    if signer.kind == "certificate":
        certificate = x509.load_pem_x509_certificate(Path(signer.options["signing_certificate"]).read_bytes())
        chain = signer.options.get("certificate_chain", [])
        return SignatureMethod("certificate", {"certificate_chain": chain}, subject=_names_in(certificate)[0])
    private = Path(signer.options["private_key"]).read_bytes()
    key = serialization.load_pem_private_key(private, _password()).public_key()
    public = folder / "key.pub"
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_bytes(serialization.Encoding.PEM, form))
    return SignatureMethod("key", {"public_key": str(public)})


def _password() -> bytes | None:
    return os.environ.get(PASSWORD_VARIABLE, "").encode() or None


def _import_model_signing() -> Any:
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
def _translated(what: str, method: SignatureMethod, differing: Sequence[str] = ()) -> Iterator[None]:
    from cryptography.exceptions import InvalidSignature

    try:
        yield
    except PipelineError:
        raise
    except OSError as error:
        raise SignatureError(f"{what}\n  {error.strerror or error}: {error.filename}") from error
    except InvalidSignature as error:
        raise SignatureError(
            f"{what}\n  not signed by {describe_method(method)}, or changed since"
        ) from error
    except Exception as error:  # of any library below model-signing: malformed keys, signatures, payloads
        is_difference = bool(differing) and str(error).startswith("Signature mismatch")
        reasons = differing if is_difference else (f"{type(error).__name__}: {str(error)[:300]}", *differing)
        hint = f"export {PASSWORD_VARIABLE}=…" if "assword" in str(error) else None
        raise SignatureError("\n".join((what, *(f"  {reason}" for reason in reasons))), hint=hint) from error


def _known_digests(subject: SignatureSubject) -> Any:
    """Returns a hashing configuration for model-signing that takes a subject's digests as they are."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class KnownDigests(hashing.Config):
        def hash(self, model_path: object, *, files_to_hash: object = None) -> manifest.Manifest:  # noqa: ARG002
            kind = manifest.SerializationType.from_args(dict(_SERIALIZATION))
            return manifest.Manifest(subject.name, [_item(kind, entry) for entry in subject.files], kind)

    def _item(kind: manifest.SerializationType, entry: FileEntry) -> manifest.ManifestItem:
        return kind.new_item(entry.path, Digest("sha256", bytes.fromhex(entry.sha256.removeprefix(PREFIX))))

    config: Any = KnownDigests
    return config()
