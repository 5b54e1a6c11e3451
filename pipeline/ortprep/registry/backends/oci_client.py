"""HTTP with an OCI registry: bounded in time, with credentials for itself and its own token server alone."""

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
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.util import parse_url

from ortprep.bundle.codec import parse_json, read_json
from ortprep.errors import AccessDeniedError, BundleError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backend import BLOCK_BYTES
from ortprep.registry.backends import rest
from ortprep.registry.backends.rest import (
    MAX_ERROR_BYTES,
    UNENCODED,
    UNREAD,
    check_http_url,
    connection_error,
    follow_redirects,
    read_body,
    read_refusal,
    status_error,
)
from ortprep.registry.documents import as_mapping
from ortprep.spec.redaction import hide_queries_in_logs

log = logging.getLogger(__name__)

_CONNECTIONS = 16
_MAX_TOKEN_BYTES = 1024 * 1024
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_HELPER_TIMEOUT_S = 60.0
_TOKEN = re.compile("[!-~]+")
_CODE = re.compile(r"[A-Z][A-Z_]{0,63}")
_PORTS = {"http": 80, "https": 443}
_ACCESS = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}
_HALF_WRITTEN = "DIGEST_INVALID"
"""What a registry says of a manifest put by tag, which has no digest to be wrong: it read one of its own
links while another push wrote it (CNCF Distribution 2.8 on a file system does not replace them at once)."""

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"


class OciClient:
    """HTTP client of the registry at a host and port, with or without TLS.

    `timeout_s` are the timeouts of a connection and of the next bytes of an answer.
    """

    def __init__(self, host: str, *, secure: bool, timeout_s: tuple[float, float]) -> None:
        self.host = host
        self.base = f"{'https' if secure else 'http'}://{host}/v2/"
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._session.headers.update(UNENCODED)
        # A callable: requests would otherwise send what `~/.netrc` has for a host.
        self._session.auth = _RegistryAuth(self)
        adapter = HTTPAdapter()
        adapter.init_poolmanager(_CONNECTIONS, _CONNECTIONS, blocksize=BLOCK_BYTES)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)
        hide_queries_in_logs()

    def close(self) -> None:
        """Closes all connections."""
        self._session.close()

    def ask(
        self, method: str, url: str, doing: str, *, limit_bytes: int = MAX_ERROR_BYTES, **options: Any
    ) -> tuple[requests.Response, bytes]:
        """Asks once, as `open` does; returns the answer and its body."""
        with self.open(method, url, doing, **options) as response:
            return response, read_body(response, doing, limit_bytes)

    def open(
        self,
        method: str,
        url: str,
        doing: str,
        *,
        expected: tuple[int, ...] = (200,),
        limit_s: float | None = None,
        **options: Any,
    ) -> requests.Response:
        """Asks once, and returns the answer with its body unread; the caller closes it.

        Args:
            method: HTTP's method.
            url: Below the registry's `/v2/`, or a whole URL that the registry gave.
            doing: What it is for, and where, as in "list the tags: HOST/REPOSITORY".
            expected: The statuses that are no error.
            limit_s: Longest time until the answer begins; None for that of a request without a large body.
            options: Those of `requests`, as `headers` and `data`.

        Raises:
            AccessDeniedError: There are no credentials, or they are not accepted.
            RegistryError: There is no answer, or an unexpected one; by kind.
        """

        def ask(url: str) -> requests.Response:
            return rest.ask_in_time(
                lambda: self._session.request(method, url, timeout=self._timeout_s, **UNREAD, **options),
                doing,
                limit_s or rest.ANSWER_TIMEOUT_S,
            )

        url = urljoin(self.base, url)
        try:
            if method in ("GET", "HEAD"):
                response = follow_redirects(ask, url, lambda _, target: self.resolve(target, doing))
            else:
                response = ask(url)
        except requests.RequestException as error:
            raise connection_error(error, doing) from None
        if response.status_code in expected:
            return response
        with response:
            code = _code_in(read_refusal(response, doing))
        refusal = status_error(response, doing, said=code, hint=f"docker login {quoted(self.host)}")
        raise RegistryUnavailableError(refusal.message) if code == _HALF_WRITTEN else refusal

    def get_token(self, realm: str, parameters: Mapping[str, str], credentials: str) -> Any:
        """Returns what a token server answers; raises RegistryUnavailableError if it is overloaded."""
        doing = f"get a token for {self.host}"
        headers = {"Authorization": credentials} if credentials else {}
        options = {"params": parameters, "headers": headers, "timeout": self._timeout_s, **UNREAD}
        with rest.ask_in_time(
            lambda: self._session.get(realm, auth=_as_it_is, **options), doing, rest.ANSWER_TIMEOUT_S
        ) as response:
            body = read_body(response, doing, _MAX_TOKEN_BYTES)
        refusal = status_error(response, doing)
        if isinstance(refusal, RegistryUnavailableError):
            raise refusal
        try:
            answer = parse_json(body, name="a token")
        except BundleError:
            return None
        return answer.get("token") or answer.get("access_token")

    def resolve(self, location: str | None, doing: str) -> str:
        """Returns the URL in a header; raises RegistryError without one, or if it leaves https for http.

        It is what `check_http_url` returns.
        """
        if not location:
            raise RegistryError(f"cannot {doing}\n  expected a location, got none")
        try:
            url = check_http_url(urljoin(self.base, location))
        except ValueError as error:
            raise connection_error(error, doing) from None
        if url.startswith("http:") and self.is_own("https" + url[4:]):
            # Registries behind a proxy that ends TLS do not know that they are asked over it.
            return "https" + url[4:]
        if self.base.startswith("https:") and not url.startswith("https:"):
            raise RegistryError(f"cannot {doing}\n  expected an https URL, got another")
        return url

    def is_own(self, url: str) -> bool:
        """Says whether a URL leads to the registry itself: its scheme, host and port."""
        return _origin(url) == _origin(self.base)


class _RegistryAuth(AuthBase):
    """Adds credentials to requests to the registry's own origin, and answers its challenges alone."""

    def __init__(self, client: OciClient) -> None:
        self._client = client
        self._headers: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._client.is_own(str(request.url)):
            header = self._headers.get(_scope_of(request))
            if header:
                request.headers["Authorization"] = header
            request.register_hook("response", self._answer_challenge)
        return request

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
        request.headers["Authorization"] = self._authorize(_scope_of(request), challenge, rejected)
        if isinstance(request.body, io.FileIO):
            request.body.seek(0)
        answer: requests.Response = response.connection.send(request, **options)
        answer.request = request
        return answer

    def _authorize(self, scope: tuple[str, str], challenge: str, rejected: str) -> str:
        """Returns the `Authorization` header for what was refused with another one, or with none."""
        with self._lock:
            current = self._headers.pop(scope, "")
            header = current if current not in ("", rejected) else self._find_header(challenge)
            if not header or header == rejected:
                host = self._client.host
                raise AccessDeniedError(
                    f"registry refuses access: {host}/{scope[0]}\n"
                    f"  expected credentials that it accepts, got {'others' if rejected else 'none'}",
                    hint=f"docker login {quoted(host)}",
                )
            self._headers[scope] = header
            return header

    def _find_header(self, challenge: str) -> str:
        """Returns the header that answers a challenge, "" if there are no credentials that do."""
        client = self._client
        scheme, _, rest_of_it = challenge.partition(" ")
        credentials = read_credentials(client.host)
        basic = f"Basic {credentials}" if credentials else ""
        if scheme.lower() == "basic":
            return basic
        fields, doing = requests.utils.parse_dict_header(rest_of_it), f"get a token for {client.host}"
        realm = client.resolve(fields.get("realm"), doing)
        if basic and not _is_token_server(realm, client.base):
            raise AccessDeniedError(
                f"cannot {doing}\n  expected a token server that may have its credentials, "
                f"got {parse_url(realm).host}",
                hint=f"docker logout {quoted(client.host)}   (to ask for a token without credentials)",
            )
        parameters = {name: str(text) for name, text in fields.items() if name in ("service", "scope")}
        token = client.get_token(realm, parameters, basic)
        return f"Bearer {token}" if isinstance(token, str) and _TOKEN.fullmatch(token) else ""


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _scope_of(request: requests.PreparedRequest) -> tuple[str, str]:
    """Returns the repository that a request is to, and the kind of access, for which tokens are given."""
    path = re.split("/(?:manifests|blobs|tags|_catalog)", urlsplit(str(request.url)).path)[0]
    return path.removeprefix("/v2").strip("/"), _ACCESS.get(str(request.method), "push")


def _is_token_server(url: str, base: str) -> bool:
    """Says whether a token server may have the credentials of the registry at `base`.

    It is on the same host, or with TLS in the domain that the registry's host is in: `auth.docker.io` for
    `registry-1.docker.io`, `gitlab.com` for `registry.gitlab.com`. Never in a top-level domain.
    """
    own, host = (parse_url(one).host or "" for one in (base, url))
    domain = own.partition(".")[2]
    is_domain = "." in domain and not own.replace(".", "").isdecimal() and ":" not in own
    return host == own or (
        is_domain and url.startswith("https:") and (host == domain or host.endswith(f".{domain}"))
    )


def _origin(url: str) -> tuple[str | None, str | None, int | None]:
    parts = parse_url(check_http_url(url))
    return parts.scheme, parts.host, parts.port or _PORTS.get(parts.scheme or "")


def _code_in(refusal: Mapping[str, Any]) -> str:
    """Returns the code of the first error that a registry tells, "" if there is none."""
    errors = refusal.get("errors")
    code = as_mapping(errors[0] if isinstance(errors, list) and errors else None).get("code")
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""


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
    folder = os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()
    path = Path(folder) / "config.json"
    try:
        return read_json(path, max_bytes=_MAX_CONFIG_BYTES) if path.is_file() else {}
    except BundleError as error:
        raise RegistryError(
            f"cannot read Docker's configuration\n  {error.message.splitlines()[0]}",
            hint=f"docker login   (writes {quoted(path)})",
        ) from None
