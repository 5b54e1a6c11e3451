"""Admission of requests to a replica: the bearer token of clients, and a limit on the bytes of bodies."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator

from ortprep.bundle.file_memory import open_regular
from ortprep.cluster.serving.config import ServeConfig
from ortprep.cluster.serving.inference_protocol import ProtocolError
from ortprep.errors import PoolError

MIN_TOKEN_CHARACTERS = 16
_MAX_TOKEN_BYTES = 4096


class BearerToken:
    """The token that clients send; only its digest is kept, so nothing can log it.

    Raises:
        PoolError: It is short, or has characters that no `Authorization` header carries.
    """

    def __init__(self, token: str, *, source: str) -> None:
        if len(token) < MIN_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
            raise PoolError(
                f"bad token in {source}\n  expected at least {MIN_TOKEN_CHARACTERS} visible ASCII characters",
                hint="openssl rand -hex 32",
            )
        self._digest = hashlib.sha256(token.encode()).digest()

    def require(self, authorization: str | None) -> None:
        """Checks a request's `Authorization`, in the same time for every wrong token.

        Raises:
            ProtocolError: It is not `Bearer TOKEN` (status 401).
        """
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode(errors="replace")).digest()
        if not (hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"):
            raise ProtocolError.of(401, "not authorised\n  expected Authorization: Bearer TOKEN")


def read_token(config: ServeConfig) -> BearerToken | None:
    """Reads the token that a configuration names; None if it names none.

    Raises:
        PoolError: The variable is not set, the file cannot be read, or the token is bad.
    """
    if config.token_env:
        source, text = f"${config.token_env}", os.environ.get(config.token_env)
        if text is None:
            raise PoolError(f"no token in {source}\n  expected it in the environment of every replica")
    elif config.token_file:
        source = config.token_file
        try:
            with open_regular(source) as file:
                text = file.read(_MAX_TOKEN_BYTES).decode("ascii", "replace")
        except OSError as error:
            raise PoolError(f"cannot read the token: {source}\n  {error.strerror or error}") from error
    else:
        return None
    return BearerToken(text.strip(), source=source)


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
