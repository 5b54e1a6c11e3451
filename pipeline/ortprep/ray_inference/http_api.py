"""The Open Inference Protocol over HTTP, as a replica answers it; the token and the budget of clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import ortprep
from ortprep.bundle.file_memory import open_regular
from ortprep.errors import PoolError
from ortprep.ray_inference.config import RETRY_AFTER_S, ServeConfig
from ortprep.ray_inference.inference_protocol import (
    EXTENSIONS,
    HEADER_LENGTH,
    ProtocolError,
    check_json_size,
    describe_model,
    encode_response,
    parse_request,
)

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

BODY_TIMEOUT_S, MIN_BODY_TIMEOUT_S = 30.0, 3.0
"""Timeouts of a request's body, and of one of which nothing comes. As long as it comes, it takes one of the
replica's `max_ongoing_requests`."""

MIN_BYTES_PER_S = 100_000
"""Bytes of a body that give it a second more."""

MIN_TOKEN_CHARACTERS = 16
_MAX_TOKEN_BYTES = 4096

_SERVER = {"name": "ortprep", "version": ortprep.__version__}

_CLIENT_CLOSED = 499
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_AFTER_S)}}


class HttpMethods:
    """The answers of a replica to requests below `/v2`; `BundleDeployment` has what they need."""

    config: ServeConfig
    token_digest: bytes | None
    bodies: BodyBudget
    find_model: Callable[..., Any]
    infer: Callable[..., Any]
    convert: Callable[..., Any]

    async def __call__(self, request: Request) -> Response:
        """Answers a request; whatever goes wrong is an answer too, without a trace of where it did."""
        try:
            return await self._route(request)
        except ProtocolError as error:
            return _answer({"error": error.message}, error.status, _HEADERS.get(error.status))
        except (ClientDisconnect, TaskCancelledError):  # the latter is Serve's, in mid-body
            return Response(status_code=_CLIENT_CLOSED)
        except Exception:  # whatever it is, the log has it, and no text of the inside goes to a client
            log.exception("a request failed")
            return _answer({"error": "internal error; see the server's log"}, 500)

    async def _route(self, request: Request) -> Response:
        """Answers a request after its token was checked."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if self.token_digest is not None and not path.startswith("/v2/health/"):
            require_token(request.headers.get("authorization"), self.token_digest)
        for pattern, method, answer in _ROUTES:
            if (match := pattern.fullmatch(path.rstrip("/"))) is not None:
                if request.method not in (method, "HEAD" if method == "GET" else method):
                    raise ProtocolError.of(405, f"wrong method: {request.method[:20]}\n  expected {method}")
                return await answer(self, request, *match.groups(default=""))
        raise ProtocolError.of(404, "no such path\n  expected /v2, /v2/health/ready, /v2/models/NAME, …")

    async def _describe_server(self, _: Request) -> Response:
        return _answer({**_SERVER, "extensions": list(EXTENSIONS)})

    async def _report_health(self, _: Request, state: str) -> Response:
        return _answer({state: True})

    async def _describe_model(self, _: Request, name: str, version: str) -> Response:
        served = self.find_model(name, version)
        return _answer(describe_model(served.name, served.version, served.opened.config))

    async def _report_model(self, _: Request, name: str, version: str) -> Response:
        return _answer({"name": self.find_model(name, version).name, "ready": True})

    async def _infer(self, request: Request, name: str, version: str) -> Response:
        """Answers an inference request as JSON, or as bytes behind JSON."""
        served = self.find_model(name, version)
        for encoding in request.headers.getlist("content-encoding"):
            if encoding != "identity":
                raise ProtocolError.of(415, f"bad Content-Encoding: {encoding[:40]!r}\n  expected none")
        length = request.headers.get(HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) < 12):
            raise ProtocolError("bad Inference-Header-Content-Length\n  expected a number of bytes")
        json_bytes, config = None if length is None else int(length), served.opened.config
        with self.bodies.hold() as take:
            body = await self._read_body(request, take, is_json=json_bytes is None)
            size = len(body) if json_bytes is None else json_bytes
            parsed = await self.convert(size, parse_request, body, json_bytes, config)
            answers = await self.infer(served, parsed.arrays)
            check_json_size(parsed.outputs, answers, self.config.max_json_bytes)
            size = sum(array.nbytes for array in answers)
            content, json_bytes = await self.convert(
                size, encode_response, parsed, served.name, served.version, config, answers
            )
        if json_bytes is None:
            return Response(content, media_type="application/json")
        headers = {HEADER_LENGTH: str(json_bytes)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def _read_body(self, request: Request, take: Callable[[int], None], *, is_json: bool) -> bytes:
        """Returns the body, which is bounded in size and time while it is read."""
        limit, expected = self.config.max_body_bytes, f"at most {self.config.max_body_bytes} bytes"
        if is_json and self.config.max_json_bytes < limit:
            limit = self.config.max_json_bytes
            expected = f"at most {limit} bytes of JSON, or binary tensors ({HEADER_LENGTH}) and {expected}"
        too_large = ProtocolError.of(413, f"request is too large\n  expected {expected}")
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > limit):
            raise too_large
        parts, size = [], 0
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(MIN_BODY_TIMEOUT_S) as timeout:
                async for part in request.stream():
                    size += len(part)
                    # A body that hardly arrives holds one of the requests that the replica takes at a time.
                    allowed_s = MIN_BODY_TIMEOUT_S + size / MIN_BYTES_PER_S
                    timeout.reschedule(began_s + min(BODY_TIMEOUT_S, allowed_s))
                    if size > limit:
                        raise too_large
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            raise ProtocolError.of(
                408,
                "request arrived too slowly\n"
                f"  expected {MIN_BYTES_PER_S} bytes a second after the first {MIN_BODY_TIMEOUT_S:g} s, "
                f"and all within {BODY_TIMEOUT_S:g} s, got {size} bytes",
            ) from None
        return b"".join(parts)


_MODEL = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
_ROUTES = (
    (re.compile("/v2"), "GET", HttpMethods._describe_server),
    (re.compile("/v2/health/(live|ready)"), "GET", HttpMethods._report_health),
    (re.compile(_MODEL), "GET", HttpMethods._describe_model),
    (re.compile(f"{_MODEL}/ready"), "GET", HttpMethods._report_model),
    (re.compile(f"{_MODEL}/infer"), "POST", HttpMethods._infer),
)
"""Paths, the method of each, and what answers it with the groups of the path."""


def _answer(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(data), status, headers, media_type="application/json")


def require_token(authorization: str | None, digest: bytes) -> None:
    """Checks a request's `Authorization`, in the same time for every wrong token.

    Raises:
        ProtocolError: It is not `Bearer TOKEN`, with the token of that SHA-256 (status 401).
    """
    scheme, _, token = (authorization or "").partition(" ")
    sent = hashlib.sha256(token.strip().encode(errors="replace")).digest()
    if not (hmac.compare_digest(sent, digest) and scheme.lower() == "bearer"):
        raise ProtocolError.of(401, "not authorised\n  expected Authorization: Bearer TOKEN")


def read_token(config: ServeConfig) -> bytes | None:
    """Returns the SHA-256 of the token in a configuration's file, so that nothing can log it; None for none.

    Raises:
        PoolError: The file cannot be read, or its token is short or has characters that no header carries.
    """
    if config.token_file is None:
        return None
    try:
        with open_regular(config.token_file) as file:
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise PoolError(f"cannot read the token: {config.token_file}\n  {error.strerror or error}") from error
    if len(token) < MIN_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise PoolError(
            f"bad token in {config.token_file}\n"
            f"  expected at least {MIN_TOKEN_CHARACTERS} visible ASCII characters",
            hint="openssl rand -hex 32",
        )
    return hashlib.sha256(token.encode()).digest()


class BodyBudget:
    """The bytes of request bodies that a replica has at a time; used from its event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._held_bytes = max_bytes, 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes bytes of the budget for one request; they are free when it ends.

        Raises:
            ProtocolError: The function found no room for the bytes (status 503).
        """
        held_bytes = 0

        def take(size_bytes: int) -> None:
            nonlocal held_bytes
            if self._held_bytes + size_bytes > self._max_bytes:
                raise ProtocolError.of(
                    503, f"too many bytes of requests\n  expected at most {self._max_bytes} at a time"
                )
            self._held_bytes += size_bytes
            held_bytes += size_bytes

        try:
            yield take
        finally:
            self._held_bytes -= held_bytes
