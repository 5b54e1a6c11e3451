"""URLs that a spec may name: their schemes, and files on the Hugging Face Hub. Pure.

A file on the Hub is `hf://ORG/REPO/PATH.onnx@REVISION`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

HUB_SCHEME = "hf://"

_ADDRESS = re.compile(
    r"hf://(?:models/)?((?:(?:datasets|spaces)/)?(?!(?:models|datasets|spaces)/)[\w.-]+/[\w.-]+)"
    r"(?:@(refs/(?:pr|convert)/[^/@]+|[^/@]+))?/(.+)",
    re.IGNORECASE,
)
_REVISION_LAST = re.compile(r"(.+?\.onnx)@(.*)", re.IGNORECASE)
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

    def at(self, path: str) -> HubAddress:
        """Returns the address of another file of the same revision."""
        return replace(self, path=path)

    def __str__(self) -> str:
        """Returns the address as fsspec's plug-in of the Hub takes it."""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"{HUB_SCHEME}{self.repository}{revision}/{self.path}"


def is_commit(revision: str) -> bool:
    """Returns whether a revision is a whole commit: 40 lower-case hexadecimal digits."""
    return _COMMIT.fullmatch(revision) is not None


def is_hub_url(url: str) -> bool:
    """Returns whether a URL names a file on the Hub."""
    return url.lower().startswith(HUB_SCHEME)


def parse_hub_url(url: str) -> HubAddress:
    """Returns what a URL names.

    The revision follows the file, `hf://ORG/REPO/PATH.onnx@REVISION`, or the repository, as the Hub's own
    tools write it: `hf://ORG/REPO@REVISION/PATH.onnx`. In the second form `/` in a branch is written `%2F`.

    Raises:
        ValueError: The URL has neither form, or two revisions.
    """
    match = _ADDRESS.fullmatch(url)
    path = "" if match is None else match[3]
    if match is None or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("expected hf://ORG/REPO/PATH.onnx, with @REVISION after it")
    last = _REVISION_LAST.fullmatch(path)
    if last is None:
        return HubAddress(match[1], path, None if match[2] is None else unquote(match[2]))
    if not last[2]:
        raise ValueError("expected a revision after @, got none")
    if match[2] is not None:
        raise ValueError(f"expected one revision, got {match[2]!r} and {last[2]!r}")
    return HubAddress(match[1], last[1], last[2])


OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"})
"""Stores where an object appears whole or not at all."""

STORES = OBJECT_STORES | {"file", "hf", "memory"}
"""Schemes of registries and work stores; "memory" is this process's own, for tests.

Web servers are none: fsspec unpacks their answers, lists their pages without end and waits without a limit.
"""

SCHEMES = STORES - {"file"} | {"http", "https"}
"""Schemes of plain files and objects, for sources; a file of this machine is given by its path."""

_IPV6_HOST = re.compile(r"://\[[0-9A-Fa-f:.]*\]")


def check_url(url: str, schemes: frozenset[str] = SCHEMES) -> None:
    """Refuses URLs with which fsspec does more than read and write files.

    fsspec also has filesystems that wrap others (`reference`, `filecache`, `zip`, …), log in to hosts or read
    other programs' data. `::` chains them. Before fsspec 2026.6 a `reference::` URL ran code of its file.

    Raises:
        ValueError: The scheme is not one of `schemes`, or the URL is chained.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme.lower() not in schemes or "::" in _IPV6_HOST.sub("://", url, count=1):
        allowed = ", ".join(f"{name}://" for name in sorted(schemes))
        raise ValueError(f"expected a URL that begins with one of {allowed}, and has no '::'")
