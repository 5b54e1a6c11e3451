"""How OCI registries and their repositories are named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import RegistryError

MAX_REPOSITORY_LENGTH = 255
"""Longest name of a repository that registries take."""

_SCHEMES = {"oci": True, "oci+http": False}
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")
_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


@dataclass(frozen=True)
class Place:
    """Where models are.

    Attributes:
        host: Host and port of the registry.
        secure: Whether it is asked over TLS.
        prefix: What the names of the models' repositories begin with; may be "".
    """

    host: str
    secure: bool
    prefix: str


def parse_url(url: str) -> Place:
    """Returns where a URL leads.

    Raises:
        RegistryError: It is not of the form that is expected, or has credentials in it.
    """
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    form = "expected oci://HOST[:PORT]/PREFIX, or oci+http://… without TLS"
    if "@" in url:
        host = url.rpartition("@")[2].partition("/")[0]
        raise RegistryError(
            f"credentials in a registry's URL: …@{host}\n  expected none in it", hint=f"docker login {host}"
        )
    prefix = path.strip("/")
    if scheme.lower() not in _SCHEMES or not _HOST.fullmatch(host):
        raise RegistryError(
            f"not an OCI registry's URL: {scheme[:20]}://{host.partition('?')[0][:100]}\n  {form}"
        )
    if prefix and not is_repository(prefix):
        raise RegistryError(
            f"not a prefix for an OCI registry: {scheme}://{host}/…\n"
            f"  {form}, PREFIX of lower-case letters, digits, '.', '_', '-' and '/'"
        )
    return Place(_HUB.get(host, host), _SCHEMES[scheme.lower()], prefix)


def is_repository(name: str) -> bool:
    """Says whether an OCI registry can have a repository of that name."""
    return _REPOSITORY.fullmatch(name) is not None
