"""How users name registries and what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.paths import is_safe_name
from pipeline.errors import RegistryError
from pipeline.registry.backend import Backend
from pipeline.spec.redaction import has_credentials, redact_url

REGISTRY_VARIABLE = "ORTPREP_REGISTRY"
"""Environment variable with the registry that is meant where none is named."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OWN = "registry://"


@dataclass(frozen=True)
class Reference:
    """A model and, if named, one of its versions.

    Attributes:
        name: Of the model.
        version: An alias, a label or a digest; None for the latest version.
    """

    name: str
    version: str | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse_reference(text: str) -> Reference:
    """Returns what `NAME` or `NAME@VERSION` names.

    Raises:
        RegistryError: The text is neither.
    """
    name, at, version = text.partition("@")
    if not is_safe_name(name) or (at and not _VERSION.fullmatch(version)):
        raise RegistryError(
            f"no reference: {text[:200]!r}\n  expected NAME, or NAME@ with an alias, a label or a digest",
            hint="ortprep list",
        )
    return Reference(name, version if at else None)


def split_location(text: str, environment: Mapping[str, str] = os.environ) -> tuple[str, Reference]:
    """Returns the registry and the reference that `registry://NAME@VERSION` or `REGISTRY/NAME@VERSION` names.

    Raises:
        RegistryError: It names none, or `$ORTPREP_REGISTRY` is needed and not set.
    """
    if text.startswith(_OWN):
        return default_registry(environment), parse_reference(text.removeprefix(_OWN))
    registry, slash, reference = text.rpartition("/")
    if not slash or not registry:
        raise RegistryError(
            f"no registry in {redact_url(text)!r}\n"
            "  expected registry://NAME@VERSION or REGISTRY/NAME@VERSION"
        )
    return registry, parse_reference(reference)


def default_registry(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the registry that `$ORTPREP_REGISTRY` names.

    Raises:
        RegistryError: It is not set.
    """
    registry = environment.get(REGISTRY_VARIABLE)
    if not registry:
        raise RegistryError(
            f"no registry named\n  expected one in ${REGISTRY_VARIABLE}, got nothing",
            hint=f"export {REGISTRY_VARIABLE}=URL   (a folder, s3://…, oci://HOST/PREFIX, mlflow+http://…)",
        )
    return registry


def open_registry(url: str) -> Backend:
    """Returns the registry at a URL; nothing is asked of it yet.

    Args:
        url: A folder, any fsspec URL whose filesystem is installed, `oci://HOST/PREFIX` (`oci+http://`
            without TLS), or `mlflow+` and an MLflow tracking URI.

    Raises:
        RegistryError: The URL carries credentials or is malformed.
        MissingExtraError: The backend's package is not installed.
    """
    if has_credentials(url):
        raise RegistryError(
            f"credentials in a registry's URL: {redact_url(url)}\n"
            "  expected none: they would end up in logs and process lists",
            hint="docs/registry.md says where each kind of registry takes them from",
        )
    scheme = _SCHEME.match(url)
    name = scheme[1].lower() if scheme else ""
    # Each backend brings in its client's library, which the others' users need not have.
    if name in ("oci", "oci+http"):
        from pipeline.registry.backends.oci.backend import OciBackend

        return OciBackend(url)
    if name == "mlflow" or name.startswith("mlflow+"):
        from pipeline.registry.backends.mlflow.backend import MlflowBackend

        return MlflowBackend(url)
    from pipeline.registry.backends.directory import DirectoryBackend

    return DirectoryBackend(url if scheme else str(Path(url).expanduser().absolute()))
