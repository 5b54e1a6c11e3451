"""How to sign, and what signatures to accept: methods of OpenSSF model-signing, as users name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortprep.errors import RegistryError

PASSWORD_VARIABLE = "ORTPREP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""

PATH_OPTIONS = frozenset(
    {"private_key", "public_key", "signing_certificate", "certificate_chain", "trust_config", "module_paths"}
)
"""Options that name files, or lists of them."""

_LISTS = frozenset({"certificate_chain", "module_paths"})
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class MethodKind:
    """A method of model-signing, and those of its arguments that are no secrets: others see command lines."""

    function: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


SIGNERS = {
    "key": MethodKind("use_elliptic_key_signer", ("private_key",)),
    "certificate": MethodKind(
        "use_certificate_signer", ("private_key", "signing_certificate"), ("certificate_chain",)
    ),
    "sigstore": MethodKind(
        "use_sigstore_signer",
        (),
        ("oidc_issuer", "use_ambient_credentials", "use_staging", "force_oob", "client_id", "trust_config"),
    ),
    "pkcs11": MethodKind("use_pkcs11_signer", (), ("pkcs11_uri", "module_paths")),
    "pkcs11-certificate": MethodKind(
        "use_pkcs11_certificate_signer",
        (),
        ("pkcs11_uri", "module_paths", "signing_certificate", "certificate_chain"),
    ),
}

# Without a chain model-signing accepts every authority of the web's, whose certificates anybody can get.
VERIFIERS = {
    "key": MethodKind("use_elliptic_key_verifier", ("public_key",), ("signed_names",)),
    "certificate": MethodKind(
        "use_certificate_verifier", ("certificate_chain", "subject"), ("log_fingerprints", "signed_names")
    ),
    "sigstore": MethodKind(
        "use_sigstore_verifier",
        ("identity", "oidc_issuer"),
        ("use_staging", "trust_config", "signed_names"),
    ),
}


@dataclass(frozen=True)
class SignatureMethod:
    """How to sign, or what signature to accept.

    Attributes:
        kind: `key`, `certificate`, `sigstore`, `pkcs11` or `pkcs11-certificate`.
        options: Arguments of model-signing's method of that kind.
        subject: Whose certificate it has to be: its common name or one of its alternative names.
        signed_names: Whether labels and aliases have to be signed too.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    signed_names: bool = False


def parse_signer(text: str) -> SignatureMethod:
    """Returns what `--sign` names: a private key's file, or `KIND:option=value,…`; raises RegistryError."""
    return _parse(text, SIGNERS)


def parse_verifier(text: str) -> SignatureMethod:
    """Returns what `--verify` names: a public key's file, or `KIND:option=value,…`; raises RegistryError."""
    return _parse(text, VERIFIERS)


def _parse(text: str, kinds: Mapping[str, MethodKind]) -> SignatureMethod:
    name, colon, rest = text.partition(":")
    if name not in kinds and (not colon or "/" in name or "=" not in rest):
        return SignatureMethod("key", {kinds["key"].needed[0]: text})
    if name not in kinds:
        raise RegistryError(
            f"no such kind of signature: {name!r}\n  expected one of {', '.join(kinds)}, or a file"
        )
    kind = kinds[name]
    allowed = (*kind.needed, *kind.optional)
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        option, _, value = item.partition("=")
        if option not in allowed or "pin-value" in value:
            raise RegistryError(
                f"unknown option of {name} signatures: {option!r}\n"
                f"  expected some of {', '.join(allowed)}; secrets cannot be options",
                hint=f"export {PASSWORD_VARIABLE}=…   (the password of a private key)",
            )
        options[option] = value.split(":") if option in _LISTS else _FLAGS.get(value.lower(), value)
    missing = [option for option in kind.needed if option not in options]
    if missing:
        raise RegistryError(
            f"{name} signatures need more: {', '.join(missing)}\n  expected {name}:{missing[0]}=…, got none"
        )
    subject, signed_names = options.pop("subject", ""), options.pop("signed_names", False)
    if not isinstance(signed_names, bool):
        raise RegistryError(f"bad option signed_names: {signed_names!r}\n  expected true or false")
    return SignatureMethod(name, options, subject, signed_names)


def describe_method(method: SignatureMethod) -> str:
    """Returns a method in words."""
    options = ", ".join(f"{name}={value}" for name, value in method.options.items())
    return f"{method.kind} ({options})" if options else method.kind
