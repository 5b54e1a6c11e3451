"""Credentials for an OCI registry: those of `docker login`, found and exchanged for tokens by oras."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import oras.auth
import oras.auth.utils
import oras.container
import requests

from pipeline.bundle.codec import read_json
from pipeline.errors import BundleError, RegistryError
from pipeline.registry.backends.oci.errors import access_denied, connection_error

_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"


class Authenticator:
    """Answers a registry's challenges; the answers are kept by repository and kind of access.

    Args:
        host: The registry's host and port.
        secure: Whether it is asked over TLS.
        session: What tokens are asked for with.
    """

    def __init__(self, host: str, *, secure: bool, session: requests.Session) -> None:
        self._host = host
        self._secure = secure
        self._session = session
        self._known: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        # It logs what token servers and credential helpers answer.
        logging.getLogger("oras.logger").disabled = True

    def known(self, repository: str, method: str) -> str:
        """Returns the `Authorization` header that served such a request last, "" if there is none."""
        return self._known.get(_key(repository, method), "")

    def answer(self, challenge: str, repository: str, method: str, rejected: str) -> str:
        """Returns the `Authorization` header for a request that was refused.

        Args:
            challenge: The `WWW-Authenticate` header.
            repository: The repository.
            method: The request's method.
            rejected: The `Authorization` header it was refused with, "" for none.

        Raises:
            AccessDeniedError: There are no credentials, or they are not accepted.
            RegistryError: Docker's configuration cannot be read, or the token server fails.
        """
        key = _key(repository, method)
        with self._lock:
            known = self._known.get(key, "")
            if known and known != rejected:
                return known
            self._known.pop(key, None)
            place = f"{self._host}/{repository}".rstrip("/")
            try:
                header = self._negotiate(challenge, place)
            except requests.RequestException as error:
                raise connection_error(error, place, "get a token") from None
            except (ValueError, KeyError, TypeError, AttributeError, OSError, subprocess.SubprocessError):
                # What oras raises for a token server's or a credential helper's malformed answer.
                header = ""
            if not header or header == rejected:
                raise access_denied(
                    f"registry refuses access: {place}\n"
                    f"  expected credentials that it accepts, got {'others' if rejected else 'none'}",
                    place,
                )
            self._known[key] = header
            return header

    def _negotiate(self, challenge: str, place: str) -> str:
        basic = challenge.lower().startswith("basic")
        backend = oras.auth.get_auth_backend("basic" if basic else "token", self._session, not self._secure)
        self._load_credentials(backend)
        if basic:
            header = backend.get_auth_header()["Authorization"] if hasattr(backend, "_basic_auth") else ""
            return str(header)
        realm = oras.auth.utils.parse_auth_header(challenge).realm or ""
        if self._secure and urlsplit(realm).scheme == "http":
            raise access_denied(
                f"registry sends credentials elsewhere: {place}\n"
                "  expected a token server with TLS, got one without",
                place,
            )
        original = requests.Response()
        original.headers["Www-Authenticate"] = challenge
        headers, _ = backend.authenticate_request(original, {}, refresh=True)
        return str(headers.get("Authorization", ""))

    def _load_credentials(self, backend: Any) -> None:
        # oras itself reads `~/.docker/config.json` whatever DOCKER_CONFIG says, and lets chance decide.
        backend._auth_config = read_docker_config()
        container = oras.container.Container("ortprep/credentials")
        container.registry = _DOCKER_HUB_KEY if self._host in _DOCKER_HUB else self._host
        backend.load_configs(container)


def _key(repository: str, method: str) -> tuple[str, str]:
    return repository, {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}.get(method, "push")


def read_docker_config() -> dict[str, Any]:
    """Returns the parts of Docker's configuration that say where credentials are.

    Raises:
        RegistryError: It cannot be read.
    """
    try:
        folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    except RuntimeError:
        folder = Path(os.devnull)
    path = folder / "config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            config = read_json(path, max_bytes=_MAX_CONFIG_BYTES)
        except BundleError as error:
            raise RegistryError(
                f"cannot read Docker's configuration\n  {error.message.splitlines()[0]}"
            ) from None
    auths, helpers = config.get("auths"), config.get("credHelpers")
    return {
        "auths": {_host_of(key): value for key, value in _mapping(auths).items() if isinstance(value, dict)},
        "credHelpers": {key: value for key, value in _mapping(helpers).items() if isinstance(value, str)},
        "credsStore": config.get("credsStore"),
    }


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _host_of(key: str) -> str:
    """Returns the host of a key that has a scheme and a path, as older clients wrote them."""
    return key if key == _DOCKER_HUB_KEY or "://" not in key else urlsplit(key).netloc
