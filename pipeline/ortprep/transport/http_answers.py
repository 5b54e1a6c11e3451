"""Answers over HTTP: read with limits in time and size, and translated to errors.

No message has a URL in it: those of uploads and of object storage carry signatures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import requests
import urllib3

from ortprep.bundle.codec import parse_json
from ortprep.errors import (
    AccessDeniedError,
    BundleError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from ortprep.transport.time_limit import limit_time
from ortprep.transport.transfer import BLOCK_BYTES, Download

T = TypeVar("T")

ANSWER_TIMEOUT_S = 120.0
"""Longest time for a server's first answer, and for a whole document."""

BLOCK_TIMEOUT_S = 300.0
"""Longest time for a block of a file of `BLOCK_BYTES`, in either direction."""

MAX_ERROR_BYTES = 64 * 1024
"""Number of bytes that are read of an answer without content."""

MAX_REDIRECTS = 10

_OVERLOADED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed later."""

_ODD = re.compile(r"[\x00-\x20\x7f-\x9f\\]")
"""What no URL in a header contains, and where parsers disagree: `http://A\\@B/` leads to A or to B."""

_SYSTEM_ERROR = re.compile(r"\[Errno -?[0-9]+\] ([A-Za-z ,]+)")


def connection_error(
    error: requests.RequestException | urllib3.exceptions.HTTPError | ValueError, doing: str
) -> RegistryError:
    """Returns what to raise for a request that got no answer, or only a part of one.

    `doing` says what was tried, and where, as in "list the tags: HOST/REPOSITORY". The HTTP library's error
    is to be dropped with its traceback, for it holds the URL.
    """
    if isinstance(error, requests.exceptions.SSLError):
        return RegistryError(
            f"cannot {doing}\n  expected a TLS certificate that this machine trusts, got another",
            hint="export REQUESTS_CA_BUNDLE=/path/to/the/registry's/ca.pem",
        )
    if isinstance(error, ValueError):
        return RegistryError(f"cannot {doing}\n  expected a usable URL, got none")
    text = str(error)
    system = _SYSTEM_ERROR.search(text)
    reason = system[1] if system else "the connection broke off"
    if isinstance(error, requests.Timeout) or "timed out" in text:
        reason = "nothing in time"
    return RegistryUnavailableError(f"cannot {doing}\n  expected an answer, got: {reason}")


def check_http_url(url: str) -> str:
    """Returns a URL as it is sent, so that what is compared is where a request goes.

    Raises:
        ValueError: It is malformed, ambiguous or not of HTTP, or has a user in it.
    """
    sent = requests.PreparedRequest()
    sent.prepare_url(url, None)
    parts = urllib3.util.parse_url(str(sent.url))
    if _ODD.search(url) or parts.auth is not None or parts.scheme not in ("http", "https"):
        raise ValueError("expected http(s)://host[:port]/path")
    return str(sent.url)


def ask_in_time(ask: Callable[[], T], doing: str, limit_s: float) -> T:
    """Returns what a request of a session of `make_session` returns within so many seconds, and ends it then.

    Raises:
        RegistryError: It failed or took longer; see `connection_error`.
    """
    try:
        with limit_time(limit_s, requests.Timeout):
            return ask()
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise connection_error(error, doing) from None


def status_error(
    response: requests.Response, doing: str, *, said: str = "", hint: str | None = None
) -> RegistryError:
    """Returns what to raise for an answer whose status was not the expected one.

    `said` are the registry's words or code, fit to be shown; `hint` says how to give other credentials.
    """
    status = response.status_code
    message = f"cannot {doing}\n  expected success, got status {status}{f': {said}' if said else ''}"
    if status in _OVERLOADED:
        error = RegistryUnavailableError(message)
        with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            error.retry_after_s = urllib3.Retry().parse_retry_after(response.headers.get("Retry-After", "0"))
        return error
    if status in (401, 403):
        return AccessDeniedError(message, hint=hint)
    return NotPublishedError(message) if status in (404, 410) else RegistryError(message)


def read_body(response: requests.Response, doing: str, limit_bytes: int) -> bytes:
    """Returns an answer's body; raises RegistryError if it is longer than `limit_bytes` or breaks off.

    It has `ANSWER_TIMEOUT_S`.
    """
    body = bytearray()
    with limit_time(ANSWER_TIMEOUT_S, requests.Timeout):
        for block in _read_blocks(response, doing):
            body += block
            if len(body) > limit_bytes:
                raise RegistryError(f"cannot {doing}\n  expected at most {limit_bytes} bytes, got more")
    return bytes(body)


def read_refusal(response: requests.Response, doing: str) -> dict[str, Any]:
    """Returns the JSON object with which a registry says no, an empty one if it said something else."""
    try:
        return parse_json(read_body(response, doing, MAX_ERROR_BYTES), name="an answer")
    except (RegistryError, BundleError):
        return {}


@contextmanager
def open_file(
    ask: Callable[[Mapping[str, str]], AbstractContextManager[requests.Response]],
    doing: str,
    offset: int,
) -> Iterator[Download]:
    """Opens a file at an offset, or at 0 if the server answers with all of it.

    Args:
        ask: Asks for the file, once, with the headers that it is given.
        doing: Purpose for messages: "read m.onnx".
        offset: Offset of the first byte that is wanted.

    Raises:
        NotPublishedError: It is not there.
        RegistryUnavailableError: It breaks off.
        RegistryError: The answer is compressed, or another part than was asked for.
    """
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    with ask(headers) as response:
        start, size = 0, response.headers.get("Content-Length")
        if response.status_code == 206:
            content_range = response.headers.get("Content-Range", "")
            first, _, size = content_range.partition("/")
            if not first.startswith(f"bytes {offset}-"):
                raise RegistryError(
                    f"cannot {doing}\n  expected bytes from {offset} on, got {content_range[:60]!r}"
                )
            start = offset
        if size in (None, "*"):
            size_bytes = None
        elif not re.fullmatch("[0-9]{1,20}", size):  # Python converts none of thousands of digits
            raise RegistryError(f"cannot {doing}\n  expected a size, got {size[:60]!r}")
        else:
            size_bytes = int(size)
        # What arrived before a cut is kept: the length is compared here.
        response.raw.enforce_content_length = False
        yield Download(_read_all(response, doing, start, size_bytes), start)


def _read_all(
    response: requests.Response, doing: str, position: int, size_bytes: int | None
) -> Iterator[bytes]:
    """Yields a file's blocks from a position on; raises RegistryUnavailableError if they end early."""
    for block in _read_blocks(response, doing):
        position += len(block)
        yield block
    if size_bytes is not None and position != size_bytes:
        raise RegistryUnavailableError(f"cannot {doing}\n  expected {size_bytes} bytes, got {position}")


def _read_blocks(response: requests.Response, doing: str) -> Iterator[bytes]:
    """Yields an answer's bytes as they come, never decoded; raises as `ask_in_time`.

    `iter_content` is not used: of a chunked answer it reads the line with a chunk's size, however long it is.
    """
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RegistryError(f"cannot {doing}\n  expected the bytes themselves, got a compressed answer")

    def read_block() -> bytes:
        block: bytes = response.raw.read(BLOCK_BYTES, decode_content=False)
        return block

    yield from iter(lambda: ask_in_time(read_block, doing, BLOCK_TIMEOUT_S), b"")
