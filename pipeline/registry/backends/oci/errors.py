"""What goes wrong between us and an OCI registry, in the package's own errors.

Nothing here shows an URL: those of uploads and of object storage carry signatures in their queries.
"""

from __future__ import annotations

import email.utils
import math
import re
import ssl
import time

import requests

from pipeline.bundle.codec import parse_json
from pipeline.errors import (
    AccessDeniedError,
    BundleError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from pipeline.registry.backends.oci.requests import Request

OVERLOADED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed a little later."""

_CODE = re.compile(r"[A-Z][A-Z_]{0,63}")
_CHAIN_LENGTH = 20
_MALFORMED = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidHeader,
)


def unavailable(message: str, *, retry_after_s: float = 0.0) -> RegistryUnavailableError:
    """Returns an error that says how long the registry wants to be left alone."""
    error = RegistryUnavailableError(message)
    error.retry_after_s = retry_after_s
    return error


def connection_error(error: requests.RequestException, place: str, doing: str) -> RegistryError:
    """Returns what to raise for a request that got no answer, or only a part of one.

    Args:
        error: What the HTTP library raised; to be dropped with its traceback, for it holds the URL.
        place: Host and repository.
        doing: What was tried, as in "list the tags".
    """
    causes = _causes(error)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return RegistryError(
            f"cannot {doing}: {place}\n  expected a TLS certificate that this machine trusts, got another",
            hint="export REQUESTS_CA_BUNDLE=/path/to/the/registry's/ca.pem",
        )
    if isinstance(error, _MALFORMED):
        return RegistryError(f"cannot {doing}: {place}\n  expected a usable URL from the registry, got none")
    return unavailable(f"cannot {doing}: {place}\n  expected an answer, got: {_reason(error, causes)}")


def _causes(error: BaseException) -> list[BaseException]:
    """Returns an error and everything below it, however the libraries nest it."""
    found: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting and len(found) < _CHAIN_LENGTH:
        one = waiting.pop(0)
        if isinstance(one, BaseException) and one not in found:
            found.append(one)
            waiting += [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]
    return found


def _reason(error: requests.RequestException, causes: list[BaseException]) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, requests.ReadTimeout) or any(isinstance(cause, TimeoutError) for cause in causes):
        return "nothing in time"
    if isinstance(error, requests.exceptions.ProxyError):
        return "an error of the HTTP proxy"
    system = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.errno]
    return next((text for text in system if text), "the connection broke off")


def status_error(
    status: int,
    headers: requests.structures.CaseInsensitiveDict[str],
    body: bytes,
    place: str,
    request: Request,
) -> RegistryError:
    """Returns what to raise for an answer whose status was not the expected one.

    Args:
        status: The status.
        headers: The answer's headers.
        body: Its body, perhaps not the whole.
        place: Host and repository.
        request: What was asked.
    """
    code = error_code(body)
    message = f"cannot {request.doing}: {place}\n  got status {status}{f' ({code})' if code else ''}"
    if status in OVERLOADED or code in request.passing:
        return unavailable(message, retry_after_s=_seconds(headers.get("Retry-After", "")))
    if status in (401, 403):
        return access_denied(message, place)
    return NotPublishedError(message) if status == 404 else RegistryError(message)


def access_denied(message: str, place: str) -> AccessDeniedError:
    """Returns an error whose hint is how to give other credentials."""
    return AccessDeniedError(message, hint=f"docker login {place.partition('/')[0]}")


def error_code(body: bytes) -> str:
    """Returns the code of the first error in an answer of an OCI registry, "" if it has none."""
    try:
        errors = parse_json(body, name="an answer").get("errors")
    except BundleError:
        return ""
    first = errors[0] if isinstance(errors, list) and errors else None
    code = first.get("code") if isinstance(first, dict) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError, OSError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
