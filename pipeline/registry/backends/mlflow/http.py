"""Requests to an MLflow server the way its client sends them, with its credentials, but bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import RegistryError
from pipeline.registry.backend import BLOCK_BYTES
from pipeline.registry.backends.mlflow.errors import error_of_status, translated

_MAX_ERROR_BYTES = 4096


@contextmanager
def request(host: str, endpoint: str, method: str, doing: str, **options: Any) -> Iterator[Any]:
    """Yields the answer to one request, its body not read yet, whatever its status.

    Args:
        host: What `endpoint` comes after, with scheme.
        endpoint: Path, quoted.
        method: Of HTTP.
        doing: What is being done, for messages.
        **options: For MLflow's `http_request`.

    Raises:
        RegistryUnavailableError: There was no answer.
    """
    from mlflow.utils import credentials, rest_utils

    client: Any = rest_utils
    settings: Any = credentials
    with translated(doing):
        response = client.http_request(
            settings.get_default_host_creds(host),
            endpoint,
            method,
            max_retries=0,
            retry_codes=(),
            raise_on_status=False,
            stream=True,
            **options,
        )
    with response:
        yield response


def read_body(response: Any, doing: str, *, skip: int, left: int) -> Iterator[bytes]:
    """Yields an answer's blocks: those after the first `skip` bytes, and no more than `left` of them.

    Raises:
        RegistryUnavailableError: It broke off.
    """
    with translated(doing):
        blocks = response.iter_content(BLOCK_BYTES)
        while left > 0:
            block = next(blocks, None)
            if block is None:
                return
            skipped = min(skip, len(block))
            skip -= skipped
            block = block[skipped : skipped + left]
            left -= len(block)
            if block:
                yield block


def refusal(response: Any, doing: str) -> RegistryError:
    """Returns the error that an answer stands for."""
    try:
        body = b"".join(read_body(response, doing, skip=0, left=_MAX_ERROR_BYTES))
    except RegistryError:
        body = b""
    after = str(response.headers.get("Retry-After", ""))
    return error_of_status(doing, response.status_code, said=_message_in(body), retry_after=after)


def _message_in(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return str(answer.get("message") or answer.get("detail") or "") if isinstance(answer, dict) else ""
