"""References to registries, models and versions."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.paths import is_safe_name
from ortprep.errors import MissingExtraError, RegistryError
from ortprep.registry.backend import Backend
from ortprep.spec.urls import has_credentials, redact_url
from ortprep.versions import install_command

REGISTRY_VARIABLE = "ORTPREP_REGISTRY"
"""Environment variable with the default registry."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_QUERY = re.compile("[?#]")
"""Where a query or a fragment begins, which no reference has. They may have secrets, and slashes."""

_OWN = "registry://"


@dataclass(frozen=True)
class VersionRef:
    """A model and one of its versions by alias, label or digest; None for the latest version."""

    name: str
    version: str | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse_reference(text: str) -> VersionRef:
    """Returns the reference in `NAME` or `NAME@VERSION`; raises RegistryError for other text."""
    name, at, version = text.partition("@")
    if not is_safe_name(name) or (at and not _VERSION.fullmatch(version)):
        shown = _QUERY.split(text, maxsplit=1)[0]
        raise RegistryError(
            f"not a reference: {shown[:200]!r}\n  expected NAME, or NAME@ with an alias, a label or a digest",
            hint="ortprep list",
        )
    return VersionRef(name, version if at else None)


def split_location(text: str, *, registry: str | None = None) -> tuple[str, VersionRef]:
    """Returns the registry and the reference that `registry://NAME@VERSION` or `REGISTRY/NAME@VERSION` names.

    `registry` is the one that `registry://` stands for, None for that in `$ORTPREP_REGISTRY`.

    Raises:
        RegistryError: The text is invalid, or `$ORTPREP_REGISTRY` is needed and not set.
    """
    if text.startswith(_OWN):
        return registry or default_registry(), parse_reference(text.removeprefix(_OWN))
    url = _QUERY.split(text, maxsplit=1)[0].rpartition("/")[0]
    if not url or _SCHEME.fullmatch(url):
        raise RegistryError(
            f"no registry in {redact_url(text)!r}\n"
            "  expected registry://NAME@VERSION or REGISTRY/NAME@VERSION"
        )
    return url, parse_reference(text[len(url) + 1 :])


def default_registry() -> str:
    """Returns the registry that `$ORTPREP_REGISTRY` names; raises RegistryError if it is not set."""
    registry = os.environ.get(REGISTRY_VARIABLE)
    if not registry:
        raise RegistryError(
            f"no registry given\n  expected one in ${REGISTRY_VARIABLE}, got nothing",
            hint=f"export {REGISTRY_VARIABLE}=URL   (a folder, s3://…, oci://HOST/PREFIX, mlflow+http://…)",
        )
    return registry


def open_registry(url: str) -> Backend:
    """Returns the registry at a URL, without a request to it.

    The URL is a path, an fsspec URL, `oci://HOST/PREFIX` (`oci+http://` without TLS), or `mlflow+` and an
    MLflow tracking URI.

    Raises:
        RegistryError: The URL carries credentials or is malformed.
        MissingExtraError: The backend's package is not installed.
    """
    if has_credentials(url):
        raise RegistryError(
            f"credentials in a registry's URL: {redact_url(url)}\n"
            "  expected none: they would end up in logs and process lists",
            hint="see docs/registry.md for where each kind of registry takes them from",
        )
    scheme = _SCHEME.match(url)
    name = scheme[1].lower() if scheme else ""
    # Users of one backend need not install the client library of another.
    kind = name.partition("+")[0]
    try:
        if kind == "oci":
            from ortprep.registry.backends.oci import OciBackend

            return OciBackend(url)
        if kind == "mlflow":
            from ortprep.registry.backends.mlflow import MlflowBackend

            return MlflowBackend(url)
        from ortprep.registry.backends.directory import DirectoryBackend
    except ImportError as error:
        raise MissingExtraError(
            f"cannot use the registry: {redact_url(url)}\n"
            f"  expected its client to be installed, got: {error}",
            hint=install_command(kind if kind in ("oci", "mlflow") else "registry"),
        ) from error
    return DirectoryBackend(url if scheme else str(Path(url).expanduser().absolute()))
