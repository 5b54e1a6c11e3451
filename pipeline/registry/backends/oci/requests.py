"""What is asked of an OCI registry, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_ERROR_BYTES = 64 * 1024
"""How much is read of an answer that says no more than whether it went well."""


@dataclass(frozen=True)
class Request:
    """A request to a registry.

    Attributes:
        method: The HTTP method.
        path: Below `/v2/<repository>/`; or a whole URL that the registry gave.
        doing: What it is for, as in "list the tags".
        repository: The repository; "" for the registry itself.
        headers: Additional headers.
        body: What is sent.
        expected: Statuses that are no error.
        limit_bytes: Longest body of the answer.
        passing: Error codes that say nothing about this request, which may succeed a little later.
    """

    method: str
    path: str
    doing: str
    repository: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    expected: tuple[int, ...] = (200,)
    limit_bytes: int = MAX_ERROR_BYTES
    passing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """A registry's answer, read to its end.

    Attributes:
        status: The HTTP status.
        headers: Found under their names in any case.
        body: The whole body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
