"""HTTP with an OCI registry: bounded in time, with credentials for itself and its own token server alone."""

from __future__ import annotations

import io
import re
import threading
from typing import Any, cast
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import parse_url

from ortprep.bundle.codec import parse_json
from ortprep.errors import AccessDeniedError, BundleError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backend import BLOCK_BYTES
from ortprep.registry.backends import rest
from ortprep.registry.backends.oci.credentials import read_credentials
from ortprep.registry.backends.rest import (
    UNENCODED,
    UNREAD,
    check_http_url,
    connection_error,
    follow_redirects,
    read_body,
    read_refusal,
    status_error,
)
from ortprep.spec.redaction import hide_queries_in_logs

_SEND_BLOCK_BYTES = 256 * 1024
_CONNECTIONS = 16
_MAX_TOKEN_BYTES = 1024 * 1024
_TOKEN = re.compile("[!-~]+")
_PORTS = {"http": 80, "https": 443}


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
        # Without it requests would replace our `Authorization` by what `~/.netrc` has for the host.
        self._session.auth = lambda request: request
        adapter = HTTPAdapter()
        adapter.init_poolmanager(_CONNECTIONS, _CONNECTIONS, blocksize=_SEND_BLOCK_BYTES)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)
        hide_queries_in_logs()
        self._authorizations: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes all connections."""
        self._session.close()

    def send(self, request: requests.Request, doing: str, scope: tuple[str, str]) -> requests.Response:
        """Asks once, and returns the answer with its body unread, whatever its status; the caller closes it.

        `doing` says what it is for, and where; `scope` is a repository and a kind of access to it.

        Raises:
            AccessDeniedError: There are no credentials, or they are not accepted.
            RegistryError: There is no answer, or Docker's configuration or the token server fails.
        """
        authorization = self._authorizations.get(scope, "")
        response = self._follow(request, doing, authorization)
        challenge = response.headers.get("WWW-Authenticate", "")
        is_refused = response.status_code == 401 or (response.status_code == 403 and authorization)
        if is_refused and challenge and self.is_own(response.url):
            with response:
                read_refusal(response, doing)
            response = self._follow(request, doing, self._authorize(scope, challenge, authorization))
        return response

    def _request(self, method: str, url: str, doing: str, **options: Any) -> requests.Response:
        """Asks once, and leaves redirects to the caller."""
        options |= {"timeout": self._timeout_s, **UNREAD}
        sent = options.get("data")
        sent_blocks = len(sent.getbuffer()) / BLOCK_BYTES if sent else 0.0
        limit_s = rest.ANSWER_TIMEOUT_S + rest.BLOCK_TIMEOUT_S * sent_blocks
        return rest.ask_in_time(lambda: self._session.request(method, url, **options), doing, limit_s)

    def _follow(self, request: requests.Request, doing: str, authorization: str) -> requests.Response:
        """Sends a request, with credentials to no other host than the registry's own."""

        def ask(url: str) -> requests.Response:
            credentials = {"Authorization": authorization} if authorization and self.is_own(url) else {}
            # In blocks: the time to send one piece is limited, and a chunk may take minutes.
            body = io.BytesIO(cast("bytes", request.data)) if request.data else b""
            headers = {**request.headers, **credentials}
            return self._request(str(request.method), url, doing, data=body, headers=headers)

        if request.method not in ("GET", "HEAD"):
            return ask(str(request.url))
        try:
            return follow_redirects(ask, str(request.url), lambda _, target: self.resolve(target, doing))
        except requests.RequestException as error:
            raise connection_error(error, doing) from None

    def _authorize(self, scope: tuple[str, str], challenge: str, rejected: str) -> str:
        """Returns the `Authorization` header for what was refused with another one, or with none."""
        with self._lock:
            current = self._authorizations.pop(scope, "")
            header = current if current not in ("", rejected) else self._answer(challenge)
            if not header or header == rejected:
                raise AccessDeniedError(
                    f"registry refuses access: {self.host}/{scope[0]}\n"
                    f"  expected credentials that it accepts, got {'others' if rejected else 'none'}",
                    hint=f"docker login {quoted(self.host)}",
                )
            self._authorizations[scope] = header
            return header

    def _answer(self, challenge: str) -> str:
        """Returns the header that answers a challenge, "" if there are no credentials that do."""
        scheme, _, rest = challenge.partition(" ")
        credentials = read_credentials(self.host)
        basic = {"Authorization": f"Basic {credentials}"} if credentials else {}
        if scheme.lower() == "basic":
            return basic.get("Authorization", "")
        fields, doing = requests.utils.parse_dict_header(rest), f"get a token for {self.host}"
        realm = self.resolve(fields.get("realm"), doing)
        if basic and not self._is_token_server(realm):
            raise AccessDeniedError(
                f"cannot {doing}\n  expected a token server that may have its credentials, "
                f"got {parse_url(realm).host}",
                hint=f"docker logout {quoted(self.host)}   (to ask for a token without credentials)",
            )
        parameters = {name: fields[name] for name in ("service", "scope") if name in fields}
        with self._request("GET", realm, doing, params=parameters, headers=basic) as response:
            body = read_body(response, doing, _MAX_TOKEN_BYTES)
        refusal = status_error(response, doing)
        if isinstance(refusal, RegistryUnavailableError):
            raise refusal
        try:
            answer = parse_json(body, name="a token")
        except BundleError:
            return ""
        token = answer.get("token") or answer.get("access_token")
        is_header = isinstance(token, str) and _TOKEN.fullmatch(token)
        return f"Bearer {token}" if is_header else ""

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

    def _is_token_server(self, url: str) -> bool:
        """Says whether a token server may have the registry's credentials.

        It is on the same host, or with TLS in the domain that the registry's host is in: `auth.docker.io` for
        `registry-1.docker.io`, `gitlab.com` for `registry.gitlab.com`. Never in a top-level domain.
        """
        own, host = (parse_url(one).host or "" for one in (self.base, url))
        domain = own.partition(".")[2]
        is_domain = "." in domain and not own.replace(".", "").isdecimal() and ":" not in own
        return host == own or (
            is_domain and url.startswith("https:") and (host == domain or host.endswith(f".{domain}"))
        )

    def is_own(self, url: str) -> bool:
        """Says whether a URL leads to the registry itself: its scheme, host and port."""
        return _origin(url) == _origin(self.base)


def _origin(url: str) -> tuple[str | None, str | None, int | None]:
    parts = parse_url(check_http_url(url))
    return parts.scheme, parts.host, parts.port or _PORTS.get(parts.scheme or "")
