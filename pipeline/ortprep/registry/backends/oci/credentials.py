"""Credentials for an OCI registry: those of `docker login`."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ortprep.bundle.codec import read_json
from ortprep.errors import BundleError, RegistryError
from ortprep.quoting import quoted
from ortprep.registry.documents import as_mapping

log = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_HELPER_TIMEOUT_S = 60.0
_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"


def read_credentials(host: str) -> str:
    """Returns user and password for a host as `Authorization: Basic` has them, "" if there are none."""
    key_of_host = _DOCKER_HUB_KEY if host in _DOCKER_HUB else host
    config = _read_docker_config()
    for key, value in as_mapping(config.get("auths")).items():
        # Pull secrets of Kubernetes often have URLs for hosts.
        is_url = "://" in key and key != _DOCKER_HUB_KEY
        auth = as_mapping(value).get("auth")
        if auth and (urlsplit(key).netloc if is_url else key) == key_of_host:
            return str(auth)
    helper = as_mapping(config.get("credHelpers")).get(key_of_host) or config.get("credsStore")
    return _ask_helper(str(helper), key_of_host) if helper else ""


def _ask_helper(name: str, host: str) -> str:
    try:
        done = subprocess.run(
            [f"docker-credential-{name}", "get"],
            input=host.encode(),
            capture_output=True,
            check=True,
            timeout=_HELPER_TIMEOUT_S,
        )
        answer = json.loads(done.stdout)
        return base64.b64encode(f"{answer['Username']}:{answer['Secret']}".encode()).decode()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        # Not the error itself: it may quote what the helper answered.
        log.info("docker-credential-%s has no credentials for %s: %s", name, host, type(error).__name__)
        return ""


def _read_docker_config() -> dict[str, Any]:
    folder = os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()
    path = Path(folder) / "config.json"
    try:
        return read_json(path, max_bytes=_MAX_CONFIG_BYTES) if path.is_file() else {}
    except BundleError as error:
        raise RegistryError(
            f"cannot read Docker's configuration\n  {error.message.splitlines()[0]}",
            hint=f"docker login   (writes {quoted(path)})",
        ) from None
