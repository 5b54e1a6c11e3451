"""Who made a bundle: signatures over its files by OpenSSF model-signing, and their verification.

A signature covers every file of a part by path and digest. The digests are known and checked where the
files are transferred, so signing and verifying read no file again, and a signature can be verified when
some of the variants were pulled only. What is signed is what `model_signing sign` of the whole folder would
sign.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.bundle.digest import PREFIX
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import MissingExtraError, RegistryError, SignatureError
from pipeline.registry.records import PartRecord, SignatureRecord

PASSWORD_VARIABLE = "ORTPREP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""

_SIGNERS = {
    "key": ("use_elliptic_key_signer", {"private_key"}),
    "certificate": ("use_certificate_signer", {"private_key", "signing_certificate", "certificate_chain"}),
    "sigstore": (
        "use_sigstore_signer",
        {"oidc_issuer", "use_ambient_credentials", "use_staging", "force_oob", "client_id", "trust_config"},
    ),
    "pkcs11": ("use_pkcs11_signer", {"pkcs11_uri", "module_paths"}),
    "pkcs11-certificate": (
        "use_pkcs11_certificate_signer",
        {"pkcs11_uri", "module_paths", "signing_certificate", "certificate_chain"},
    ),
}
"""Methods of model-signing, and those of their arguments that are no secrets: others see command lines."""

_VERIFIERS = {
    "key": ("use_elliptic_key_verifier", {"public_key"}),
    "certificate": ("use_certificate_verifier", {"certificate_chain", "log_fingerprints"}),
    "sigstore": ("use_sigstore_verifier", {"identity", "oidc_issuer", "use_staging", "trust_config"}),
}
PATH_OPTIONS = frozenset(
    {"private_key", "public_key", "signing_certificate", "certificate_chain", "trust_config", "module_paths"}
)
"""Options that name files, or lists of them."""

_LIBRARY_FAILURES = (
    ("OpenSSL.crypto", "Error"),
    ("OpenSSL.crypto", "X509StoreContextError"),
    ("sigstore.errors", "Error"),
    ("cryptography.exceptions", "UnsupportedAlgorithm"),
)
_LISTS = frozenset({"certificate_chain", "module_paths"})
_PREDICATE = "https://model_signing/signature/v1.0"
_SERIALIZATION = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}


@dataclass(frozen=True)
class Method:
    """How to sign, or what signature to accept.

    Attributes:
        kind: `key`, `certificate`, `sigstore`, `pkcs11` or `pkcs11-certificate`.
        options: Arguments of model-signing's method of that kind.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_signer(text: str) -> Method:
    """Returns what `--sign` names: a private key's file, or `KIND:option=value,…`.

    Raises:
        RegistryError: There is no such kind.
    """
    needed = {"key": ("private_key",), "certificate": ("private_key", "signing_certificate")}
    return _parse(text, kinds=_SIGNERS, key_option="private_key", needed=needed)


def parse_verifier(text: str) -> Method:
    """Returns what `--verify` names: a public key's file, or `KIND:option=value,…`.

    Raises:
        RegistryError: There is no such kind.
    """
    needed = {"key": ("public_key",), "sigstore": ("identity", "oidc_issuer")}
    return _parse(text, kinds=_VERIFIERS, key_option="public_key", needed=needed)


def _parse(
    text: str,
    *,
    kinds: Mapping[str, tuple[str, set[str]]],
    key_option: str,
    needed: Mapping[str, tuple[str, ...]],
) -> Method:
    kind, colon, rest = text.partition(":")
    if kind not in kinds and (not colon or "/" in kind or "=" not in rest):
        return Method("key", {key_option: text})
    if kind not in kinds:
        raise RegistryError(
            f"no such kind of signature: {kind!r}\n  expected one of {', '.join(kinds)}, or a file"
        )
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds[kind][1] or "pin-value" in value:
            raise RegistryError(
                f"no option of {kind} signatures: {name!r}\n"
                f"  expected some of {', '.join(sorted(kinds[kind][1]))}; secrets are no options",
                hint=f"export {PASSWORD_VARIABLE}=…   (the password of a private key)",
            )
        options[name] = _parse_value(name, value)
    missing = [name for name in needed.get(kind, ()) if name not in options]
    if missing:
        raise RegistryError(
            f"{kind} signatures need more: {', '.join(missing)}\n  expected {kind}:{missing[0]}=…, got none"
        )
    return Method(kind, options)


def _parse_value(name: str, value: str) -> Any:
    if name in _LISTS:
        return value.split(":")
    return {"true": True, "false": False}.get(value.lower(), value)


def sign_part(part: PartRecord, digest: str, method: Method) -> SignatureRecord:
    """Signs a part's files.

    Args:
        part: What is signed.
        digest: Of the part's record.
        method: How.

    Raises:
        SignatureError: The key cannot be used.
        MissingExtraError: model-signing is not installed.
    """
    signing = _import("signing")
    options = dict(method.options)
    if method.kind == "key":
        # Annotated as text by model-signing 1.1, and handed on to where bytes are needed.
        options["password"] = _password()
    with tempfile.TemporaryDirectory(prefix="ortprep-") as folder:
        target = Path(folder) / "model.sig"
        with _translated(f"cannot sign {part.model}", method):
            config = getattr(signing.Config(), _SIGNERS[method.kind][0])(**options)
            config.set_hashing_config(_known_digests(part)).sign(folder, target)
        return SignatureRecord(digest, json.loads(target.read_bytes()))


def verify_part(
    part: PartRecord, digest: str, signatures: Iterable[SignatureRecord], method: Method
) -> SignatureRecord:
    """Checks that one of a part's signatures is of its files, and by whom `method` says; returns it.

    Args:
        part: What should be signed.
        digest: Of the part's record.
        signatures: All signatures that claim to be for it.
        method: What signature is accepted.

    Raises:
        SignatureError: None is; the message says what is wrong with each.
        MissingExtraError: model-signing is not installed.
    """
    problems = []
    for signature in signatures:
        try:
            _verify(part, signature, method)
        except SignatureError as error:
            problems.append(error.message.partition("\n")[2] or error.message)
        else:
            return signature
    got = "\n".join(problems) or "  got none"
    raise SignatureError(
        f"no valid signature: {part.model} ({digest})\n  expected one by {describe_method(method)}\n{got}",
        hint="ortprep publish BUNDLE --sign KEY   (by whoever has the key)",
    )


def _verify(part: PartRecord, signature: SignatureRecord, method: Method) -> None:
    statement = _read_statement(signature)
    verifying = _import("verifying")
    with tempfile.TemporaryDirectory(prefix="ortprep-") as folder:
        source = Path(folder) / "model.sig"
        source.write_text(json.dumps(signature.bundle), encoding="utf-8")
        with _translated(f"signature of {part.model} is not valid", method, differences(part, statement)):
            config = getattr(verifying.Config(), _VERIFIERS[method.kind][0])(**method.options)
            config.set_hashing_config(_known_digests(part)).verify(Path(folder), source)


def _read_statement(signature: SignatureRecord) -> dict[str, Any]:
    """Returns what is signed, as yet unverified, unless it says less than what we sign says.

    model-signing also accepts what it wrote before 1.0, and keys that are not named.
    """
    try:
        material = signature.bundle["verificationMaterial"]
        statement: dict[str, Any] = json.loads(base64.b64decode(signature.bundle["dsseEnvelope"]["payload"]))
        predicate = statement["predicate"] if statement["predicateType"] == _PREDICATE else {}
        serialization = {name: predicate["serialization"][name] for name in ("method", "hash_type")}
        names_key = "publicKey" not in material or bool(material["publicKey"]["hint"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SignatureError(
            f"signature is not of this form\n  expected {_PREDICATE}, got another"
        ) from error
    if serialization != {"method": "files", "hash_type": "sha256"} or not names_key:
        raise SignatureError(
            "signature says too little\n  expected SHA-256 of every file, and which key it is by"
        )
    return statement


def differences(part: PartRecord, statement: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns every difference between what is signed and a part's files, in words."""
    resources = statement["predicate"].get("resources")
    listed = resources if isinstance(resources, list) else []
    signed = {
        str(one.get("name")): PREFIX + str(one.get("digest")) for one in listed if isinstance(one, dict)
    }
    recorded = {entry.path: entry.sha256 for entry in part.files}
    return (
        *(f"{path}: not signed" for path in sorted(recorded.keys() - signed.keys())),
        *(f"{path}: signed, and not there" for path in sorted(signed.keys() - recorded.keys())),
        *(
            f"{path}: content: signed {signed[path]}, got {recorded[path]}"
            for path in sorted(signed.keys() & recorded.keys())
            if signed[path] != recorded[path]
        ),
    )


def is_signed_by(
    part: PartRecord, digest: str, signatures: Iterable[SignatureRecord], signer: Method
) -> bool:
    """Says whether a part has a valid signature by this signer, if that can be told without signing."""
    if signer.kind == "certificate":
        chain = signer.options.get("certificate_chain", [])
        return _is_valid(part, digest, signatures, Method("certificate", {"certificate_chain": chain}))
    if signer.kind != "key":
        return False
    _import("signing")
    from cryptography.hazmat.primitives import serialization

    with _translated(f"cannot sign {part.model}", signer), tempfile.TemporaryDirectory() as folder:
        private = Path(signer.options["private_key"]).read_bytes()
        key = serialization.load_pem_private_key(private, _password()).public_key()
        public = Path(folder) / "key.pub"
        public.write_bytes(
            key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return _is_valid(part, digest, signatures, Method("key", {"public_key": str(public)}))


def _is_valid(part: PartRecord, digest: str, signatures: Iterable[SignatureRecord], method: Method) -> bool:
    try:
        verify_part(part, digest, signatures, method)
    except SignatureError:
        return False
    return True


def _password() -> bytes | None:
    text = os.environ.get(PASSWORD_VARIABLE)
    return text.encode() if text else None


def describe_method(method: Method) -> str:
    """Returns a method in words."""
    shown = ", ".join(f"{name}={value}" for name, value in method.options.items())
    return f"{method.kind} ({shown})" if shown else method.kind


def _import(name: str) -> Any:
    try:
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise MissingExtraError(
            "model-signing is not installed\n  expected it to sign and verify",
            hint="pip install 'ortprep[sign]'",
        ) from error
    return getattr(model_signing, name)


@contextmanager
def _translated(what: str, method: Method, differing: Sequence[str] = ()) -> Iterator[None]:
    from cryptography.exceptions import InvalidSignature

    own: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)
    try:
        yield
    except OSError as error:
        raise SignatureError(f"{what}\n  {error.strerror or error}: {error.filename}") from error
    except InvalidSignature as error:
        raise SignatureError(
            f"{what}\n  not signed by {describe_method(method)}, or changed since"
        ) from error
    except own + _library_failures() as error:
        # model-signing's own, of malformed keys, signatures and payloads, and of files that differ
        is_difference = bool(differing) and str(error).startswith("Signature mismatch")
        reasons = differing if is_difference else (f"{type(error).__name__}: {str(error)[:300]}", *differing)
        hint = f"export {PASSWORD_VARIABLE}=…" if "assword" in str(error) else None
        raise SignatureError("\n".join((what, *(f"  {reason}" for reason in reasons))), hint=hint) from error


def _library_failures() -> tuple[type[Exception], ...]:
    """Returns what libraries under model-signing raise, of those that were imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _LIBRARY_FAILURES)
    return tuple(kind for kind in found if kind is not None)


def _known_digests(part: PartRecord) -> Any:
    """Returns a hashing configuration for model-signing that takes a part's digests as they are."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class KnownDigests(hashing.Config):
        def hash(self, model_path: object, *, files_to_hash: object = None) -> manifest.Manifest:  # noqa: ARG002
            kind = manifest.SerializationType.from_args(dict(_SERIALIZATION))
            return manifest.Manifest(part.model, [_item(kind, entry) for entry in part.files], kind)

    def _item(kind: manifest.SerializationType, entry: FileEntry) -> manifest.ManifestItem:
        return kind.new_item(entry.path, Digest("sha256", bytes.fromhex(entry.sha256.removeprefix(PREFIX))))

    config: Any = KnownDigests
    return config()
