"""Files of the Hugging Face Hub.

The Hub's own client finds the token (`HF_TOKEN`, or the file that `hf auth login` writes) and says what a
file is: its commit, its digest, and where its bytes are. They come as those of every other source do: the
client's own downloads have no limit in size and time.

A branch can move, so a revision is resolved to a commit first, and every file is read from that commit.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from ortprep.bundle.digest import PREFIX
from ortprep.errors import (
    MissingExtraError,
    RegistryError,
    RegistryUnavailableError,
)
from ortprep.spec.urls import HubAddress, hide_queries_in_logs, is_commit
from ortprep.stages.fetch.sources import WebFile, check_redirect, source_errors
from ortprep.transport import time_limit
from ortprep.transport.transfer import Download
from ortprep.versions import install_command

ANSWER_TIMEOUT_S = 120.0

_KINDS = {"datasets": "dataset", "spaces": "space"}
_PASSING_STATUS = frozenset({408, 425, 429})
_SHA256 = re.compile("[0-9a-f]{64}")
_LOGIN = "hf auth login   # or set HF_TOKEN"

_REFUSALS = (
    (
        "GatedRepoError",
        "no access to a gated repository: {0.repository}",
        f"accept the terms on the repository's page, then: {_LOGIN}",
    ),
    ("RevisionNotFoundError", "no such revision: {0.revision} of {0.repository}", None),
    ("RepositoryNotFoundError", "no such repository, or no access to it: {0.repository}", _LOGIN),
    ("EntryNotFoundError", "no such file on the Hub: {0}", None),
)
"""Errors of the client, those of a kind before the kind, what they mean, and advice."""


@dataclass(frozen=True)
class HubFile:
    """A file of one commit, which its address has."""

    address: HubAddress

    @property
    def name(self) -> str:
        """The URL, which has no credentials."""
        return str(self.address)

    @contextmanager
    def open(self, offset: int) -> Iterator[Download]:
        """Opens the file; raises as `Source.open`, and MissingExtraError without the Hub's client."""
        found, url, token = _ask(self.address)
        # A large file is elsewhere, by a signed URL; the token is for the Hub alone.
        location = check_redirect(url, found.location)
        is_own = urlsplit(location)[:2] == urlsplit(url)[:2]
        file = WebFile(location, token if is_own else None, shown=self.name)
        # The tag of a large file is its digest; of small ones the Hub knows git's own.
        sha256 = PREFIX + found.etag if _SHA256.fullmatch(found.etag or "") else None
        with file.open(offset) as opened:
            yield replace(opened, sha256=sha256)

    def beside(self, location: str) -> HubFile:
        """Returns a file of the same commit in this one's folder, or below it."""
        path = posixpath.join(posixpath.dirname(self.address.path), location)
        return HubFile(replace(self.address, path=path))


def pin(address: HubAddress) -> HubAddress:
    """Returns the same file of the commit that its revision names now.

    Raises:
        SourceError: There is no such file or revision, no access to it, the Hub cannot be reached, or its
            answer is no commit.
        MissingExtraError: The Hub's client is not installed.
    """
    if address.commit is not None:
        return address
    with source_errors():
        commit = str(_ask(address)[0].commit_hash)
        if not is_commit(commit):
            raise RegistryError(
                f"unexpected answer from the Hub: {address}\n  expected a commit, got {commit[:80]!r}"
            )
    return replace(address, revision=commit)


def _client() -> Any:
    """Returns the Hub's client, whose HTTP libraries log no queries from now on."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtraError(
            "hf:// URLs need huggingface_hub, which is not installed", hint=install_command("hub")
        ) from error
    for logger in ("httpx", "httpx2", "httpcore.http11", "httpcore2.http11"):
        hide_queries_in_logs(logger)
    return huggingface_hub


def _ask(address: HubAddress) -> tuple[Any, str, str | None]:
    """Returns what the Hub says of a file, the URL that was asked, and what was sent as authorization.

    The messages of its client are left out: they quote signed URLs of the servers behind the Hub.
    """
    client = _client()
    errors = client.errors
    kind, _, rest = address.repository.partition("/")
    try:
        url = client.hf_hub_url(
            rest if kind in _KINDS else address.repository,
            address.path,
            repo_type=_KINDS.get(kind),
            revision=address.revision,
        )
        found = time_limit.call_in_time(lambda: client.get_hf_file_metadata(url), ANSWER_TIMEOUT_S)
        return found, url, client.utils.build_hf_headers().get("authorization")
    except (
        OSError,
        ValueError,
        RuntimeError,
        time_limit.OutOfTimeError,
        errors.HfHubHTTPError.__bases__[0],
    ) as error:
        raise _explain(error, address, errors) from None


def _explain(error: BaseException, address: HubAddress, errors: Any) -> RegistryError:
    """Returns what to raise for an error of the Hub's client."""
    for name, message, hint in _REFUSALS:
        if isinstance(error, getattr(errors, name)):
            return RegistryError(message.format(address), hint=hint)
    first_line = (str(error) or type(error).__name__).splitlines()[0][:300]
    passes = not isinstance(error, ValueError)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        first_line, passes = f"got HTTP {status}", status >= 500 or status in _PASSING_STATUS
    if passes:
        return RegistryUnavailableError(f"cannot reach the Hub: {address}\n  {first_line}")
    return RegistryError(f"cannot fetch: {address}\n  {first_line}")
