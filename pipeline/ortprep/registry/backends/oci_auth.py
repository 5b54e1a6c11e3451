"""Credentials of OCI registries: those of `docker login`, for a registry and its own token server alone."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.util import parse_url

from ortprep.bundle.codec import parse_json, read_json
from ortprep.errors import AccessDeniedError, BundleError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backends.http_client import ANY_STATUS, HttpClient, origin_of
from ortprep.registry.documents import as_mapping
from ortprep.transport.http_answers import read_refusal

log = logging.getLogger(__name__)

_MAX_TOKEN_BYTES = 1024 * 1024
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_HELPER_TIMEOUT_S = 60.0
_TOKEN = re.compile("[!-~]+")
_CODE = re.compile(r"[A-Z][A-Z_]{0,63}")
_ACCESS = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}
_HALF_WRITTEN = "DIGEST_INVALID"
"""What a registry says of a manifest put by tag, which has no digest to be wrong: it read one of its own
links while another push wrote it (CNCF Distribution 2.8 on a file system does not replace them at once)."""

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"


class OciClient(HttpClient):
    """A client of the API of the registry at a host and port, which answers that registry's challenges alone.

    Args:
        host: Host and port.
        secure: Whether it has TLS.
        timeout_s: Timeouts of a connection, and of the next bytes of an answer, in seconds.
    """

    def __init__(self, host: str, *, secure: bool, timeout_s: tuple[float, float]) -> None:
        base = f"{'https' if secure else 'http'}://{host}/v2/"
        super().__init__(base, timeout_s=timeout_s, login_hint=f"docker login {quoted(host)}")
        self._host = host
        self._headers: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def authorize(self, request: requests.PreparedRequest) -> None:
        """Adds the credentials that were accepted last for such a request."""
        if header := self._headers.get(_scope_of(request)):
            request.headers["Authorization"] = header
        request.register_hook("response", self._answer_challenge)

    @staticmethod
    def read_reason(refusal: Mapping[str, Any]) -> str:
        """Returns the code of the first error in a refusal, "" if there is none."""
        errors = refusal.get("errors")
        code = as_mapping(errors[0] if isinstance(errors, list) and errors else None).get("code")
        return code if isinstance(code, str) and _CODE.fullmatch(code) else ""

    def refuse(self, response: requests.Response, refusal: Mapping[str, Any], doing: str) -> RegistryError:
        """Returns the error that an answer stands for; a push that met another one may be tried again."""
        error = super().refuse(response, refusal, doing)
        is_race = response.status_code == 400 and self.read_reason(refusal) == _HALF_WRITTEN
        return RegistryUnavailableError(error.message) if is_race else error

    def _answer_challenge(self, response: requests.Response, **options: Any) -> requests.Response:
        """Sends a refused request once more, with other credentials."""
        rejected = str(response.request.headers.get("Authorization", ""))
        challenge = response.headers.get("WWW-Authenticate", "")
        is_refused = response.status_code == 401 or (response.status_code == 403 and rejected)
        if not is_refused or not challenge:
            return response
        with response:
            read_refusal(response, "log in")
        request = response.request.copy()
        request.headers["Authorization"] = self._find_next_header(_scope_of(request), challenge, rejected)
        if isinstance(request.body, io.FileIO):
            request.body.seek(0)
        answer: requests.Response = response.connection.send(request, **options)
        answer.request = request
        return answer

    def _find_next_header(self, scope: tuple[str, str], challenge: str, rejected: str) -> str:
        """Returns the `Authorization` header for what was refused with another one, or with none."""
        with self._lock:
            current = self._headers.pop(scope, "")
            header = current if current not in ("", rejected) else self._find_header(challenge)
            if not header or header == rejected:
                raise AccessDeniedError(
                    f"registry refuses access: {self._host}/{scope[0]}\n"
                    f"  expected credentials that it accepts, got {'others' if rejected else 'none'}",
                    hint=f"docker login {quoted(self._host)}",
                )
            self._headers[scope] = header
            return header

    def _find_header(self, challenge: str) -> str:
        """Returns the header that answers a challenge, "" if there are no credentials that do."""
        scheme, _, rest_of_it = challenge.partition(" ")
        credentials = read_credentials(self._host)
        basic = f"Basic {credentials}" if credentials else ""
        if scheme.lower() == "basic":
            return basic
        fields, doing = requests.utils.parse_dict_header(rest_of_it), f"get a token for {self._host}"
        realm = self.resolve(fields.get("realm"), doing)
        if basic and not _is_token_server(realm, self.base):
            raise AccessDeniedError(
                f"cannot {doing}\n  expected a token server that may have its credentials, "
                f"got {parse_url(realm).host}",
                hint=f"docker logout {quoted(self._host)}   (to ask for a token without credentials)",
            )
        parameters = {name: str(text) for name, text in fields.items() if name in ("service", "scope")}
        token = self._get_token(realm, parameters, basic, doing)
        return f"Bearer {token}" if isinstance(token, str) and _TOKEN.fullmatch(token) else ""

    def _get_token(self, realm: str, parameters: Mapping[str, str], credentials: str, doing: str) -> Any:
        """Returns what a token server answers; raises RegistryUnavailableError if it is overloaded."""
        response, body = self.ask(
            "GET",
            realm,
            doing,
            expected=ANY_STATUS,
            limit_bytes=_MAX_TOKEN_BYTES,
            auth=lambda request: request,
            headers={"Authorization": credentials} if credentials else {},
            params=parameters,
        )
        refusal = self.refuse(response, {}, doing)
        if isinstance(refusal, RegistryUnavailableError):
            raise refusal
        try:
            answer = parse_json(body, name="a token")
        except BundleError:
            return None
        return answer.get("token") or answer.get("access_token")


def _scope_of(request: requests.PreparedRequest) -> tuple[str, str]:
    """Returns the repository that a request is to, and the kind of access, for which tokens are given."""
    path = re.split("/(?:manifests|blobs|tags|_catalog)", urlsplit(str(request.url)).path)[0]
    return path.removeprefix("/v2").strip("/"), _ACCESS.get(str(request.method), "push")


def _is_token_server(url: str, base: str) -> bool:
    """Says whether a token server may have the credentials of the registry at `base`.

    It is the registry itself, or with TLS in the domain that the registry's host is in: `auth.docker.io` for
    `registry-1.docker.io`, `gitlab.com` for `registry.gitlab.com`. Never in a top-level domain.
    """
    own, host = (parse_url(one).host or "" for one in (base, url))
    domain = own.partition(".")[2]
    is_domain = "." in domain and not own.replace(".", "").isdecimal() and ":" not in own
    is_near = is_domain and url.startswith("https:") and f".{host}".endswith(f".{domain}")
    return is_near or origin_of(url) == origin_of(base)


def read_credentials(host: str) -> str:
    """Returns user and password for a host as `Authorization: Basic` has them, "" if there are none.

    They are those of `docker login`.
    """
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
    """Returns what one of Docker's credential helpers has for a host, "" if it has nothing."""
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
    """Returns what `docker login` wrote, an empty object if there is no such file."""
    folder = os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()
    path = Path(folder) / "config.json"
    try:
        return read_json(path, max_bytes=_MAX_CONFIG_BYTES) if path.is_file() else {}
    except BundleError as error:
        raise RegistryError(
            f"cannot read Docker's configuration\n  {error.message.splitlines()[0]}",
            hint=f"docker login   (writes {quoted(path)})",
        ) from None
