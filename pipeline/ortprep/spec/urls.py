"""URLs: files on the Hugging Face Hub, places of registries, and how they are shown without secrets.

A file on the Hub is `hf://ORG/REPO@REVISION/PATH.onnx`, as the Hub's own tools write it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

_ADDRESS = re.compile(
    r"hf://(?:models/)?((?:(?:datasets|spaces)/)?(?!(?:models|datasets|spaces)/)[\w.-]+/[\w.-]+)"
    r"(?:@(refs/(?:pr|convert)/[^/@]+|[^/@]+))?/([^\s?#@\x00-\x1f\x7f]+)",
    re.IGNORECASE,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubAddress:
    """A file in a repository of the Hub.

    Attributes:
        repository: `ORG/REPO` for models, `datasets/ORG/REPO` or `spaces/ORG/REPO`.
        path: Path in the repository.
        revision: Branch, tag, commit or `refs/pr/N`; None for the default branch.
    """

    repository: str
    path: str
    revision: str | None = None

    @property
    def commit(self) -> str | None:
        """The revision if it is a whole commit, which never moves."""
        return self.revision if self.revision and is_commit(self.revision) else None

    def __str__(self) -> str:
        """Returns the URL."""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repository}{revision}/{self.path}"


def is_commit(revision: str) -> bool:
    """Returns whether a revision is a whole commit: 40 lower-case hexadecimal digits."""
    return _COMMIT.fullmatch(revision) is not None


def parse_hub_url(url: str) -> HubAddress:
    """Returns what a URL names; `/` in a branch is written `%2F`.

    Raises:
        ValueError: It is no URL of a file on the Hub.
    """
    match = _ADDRESS.fullmatch(url)
    if match is None or any(part in ("", ".", "..") for part in match[3].split("/")):
        raise ValueError(
            "expected hf://ORG/REPO@REVISION/PATH.onnx; download a file of another server, and use path:"
        )
    return HubAddress(match[1], match[3], None if match[2] is None else unquote(match[2]))


STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hf", "file", "memory"))
"""Schemes of registries; "memory" is this process's own, for tests.

Web servers are none: fsspec unpacks their answers, lists their pages without end and waits without a limit.
"""

_IPV6_HOST = re.compile(r"^\[[0-9A-Fa-f:.]*\]")


def check_url(url: str) -> None:
    """Refuses URLs with which fsspec does more than read and write files.

    fsspec also has filesystems that wrap others (`reference`, `filecache`, `zip`, …), log in to hosts or read
    other programs' data. `::` chains them. Before fsspec 2026.6 a `reference::` URL ran code of its file.

    Raises:
        ValueError: The scheme is not one of `STORES`, or the URL is chained.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in STORES or "::" in _IPV6_HOST.sub("", rest, count=1):
        allowed = ", ".join(f"{name}://" for name in sorted(STORES))
        raise ValueError(f"expected a URL that begins with one of {allowed}, and has no '::'")


REDACTED = "REDACTED"
"""What stands where a secret stood."""

_MAX_SHOWN = 65_536
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/*")
_USER = re.compile(r"[^/?#]*@|[^][/?#:@]*:(?![0-9]*(?:[/?#]|$)).*@", re.DOTALL)
"""The second form is a password with an unescaped `/`, `?` or `#`: what follows the colon is no port."""

_PARAMETERS = re.compile(r"([?#]).*", re.DOTALL)
_QUERY = re.compile(r"(?<=[a-zA-Z0-9/])\?[^\s'\"]+=[^\s'\"]*")


def redact_url(url: str) -> str:
    """Returns `url` without user, password, query and fragment.

    The query has the signature of a presigned URL, or a token under whatever name. Two URLs may read the
    same: the result is for people, never a key. Total and idempotent. Secrets in the path stay: they look
    like other paths. What is too long is not shown at all, and nor is what follows the first scheme of
    fsspec's chained URLs (`zip://a.onnx::https://…`), which are refused.
    """
    if len(url) > _MAX_SHOWN:
        return REDACTED
    scheme, user, rest = _split(url)
    if "::" in _IPV6_HOST.sub("", rest, count=1):
        return f"{scheme}{REDACTED}"
    location = _PARAMETERS.sub(rf"\1{REDACTED}", rest)
    return f"{scheme}{REDACTED + '@' if user else ''}{location}"


def hide_queries_in_logs(package: str) -> None:
    """Cuts the queries off the URLs that an HTTP client logs: they have tokens and signatures in them.

    Exceptions are logged by their types alone: their texts have whole headers in them. It counts for all
    loggers of the package that there are by now, since a filter sees no records of the loggers below its own.
    """
    for name in (package, *logging.Logger.manager.loggerDict):
        if name == package or name.startswith(f"{package}."):
            logging.getLogger(name).addFilter(_hide_queries)


def _hide_queries(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_hide_query, record.args))
    record.exc_info = record.exc_text = None
    record.msg = _QUERY.sub("?…", str(record.msg))
    return True


def _hide_query(argument: object) -> object:
    if isinstance(argument, BaseException):
        return type(argument).__name__
    if isinstance(argument, int | float) or "?" not in str(argument):
        return argument
    return str(argument).partition("?")[0] + "?…"


def has_credentials(url: str) -> bool:
    """Returns whether `url` carries a password, or for http and https any user part (it may be a token)."""
    scheme, user, _ = _split(url)
    return ":" in user or (user != "" and scheme.rstrip("/").lower() in ("http:", "https:"))


def _split(url: str) -> tuple[str, str, str]:
    """Returns the scheme with its `://`, the user part with its `@`, and the rest."""
    scheme = _SCHEME.match(url)
    start = scheme.end() if scheme else 0
    user = _USER.match(url, start)
    end = user.end() if user else start
    return url[:start], url[start:end], url[end:]
