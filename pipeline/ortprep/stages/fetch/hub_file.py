"""Files of the Hugging Face Hub, through the file system of the Hub's own client.

A branch can move, so a revision is resolved to a commit first, and every file is read from that commit. The
token comes from where the client finds it: `HF_TOKEN`, or the file that `hf auth login` writes.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ortprep.bundle.digest import PREFIX, digest_json
from ortprep.bundle.file_memory import cache_folder, read_entry, write_entry
from ortprep.errors import MissingExtraError, SourceError
from ortprep.quoting import quoted
from ortprep.spec.hub_url import HubAddress, is_commit
from ortprep.spec.redaction import hide_queries_in_logs
from ortprep.stages.core.sources import CONFIG_FILE
from ortprep.stages.fetch.transfer import Download, TransferError, first_line, guard_reads
from ortprep.versions import install_command

log = logging.getLogger(__name__)

_BLOCK_BYTES = 32 << 20
"""Bytes per request: each is redirected to another server, so few large ones are faster."""

_KINDS = {"datasets": "dataset", "spaces": "space"}
_RETRIED_STATUS = frozenset({408, 425, 429})
_COMMIT_BYTES = 40
_LOGIN = "hf auth login   # or set HF_TOKEN"


@dataclass(frozen=True)
class HubFile:
    """A file of one commit.

    Attributes:
        address: Where it is; its revision is a commit.
    """

    address: HubAddress

    @property
    def name(self) -> str:
        """The URL, which has no credentials."""
        return str(self.address)

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Download]:
        """Opens the file, at `offset` if what came before was of this commit, too.

        Raises:
            SourceError: There is no such file, or no access to it.
            MissingExtraError: The Hub's client is not installed.
            TransferError: The Hub does not answer right now.
        """
        path = self.name.removeprefix("hf://")
        with _explained(self.address):
            filesystem = _client().HfFileSystem(skip_instance_cache=True)
            info = filesystem.info(path)
            if info.get("type") == "directory":
                raise IsADirectoryError(path)
            file = filesystem.open(path, "rb", block_size=_BLOCK_BYTES)
        with file:
            start = offset if version == self.address.revision else 0
            file.seek(start)

            def read(size: int) -> bytes:
                with _explained(self.address):
                    return bytes(file.read(size))

            yield Download(
                guard_reads(read, ()), start, info["size"], self.address.revision, _digest_of(info)
            )


def _digest_of(info: Any) -> str | None:
    """Returns the digest of a large file; the Hub knows git's own of small ones only."""
    lfs = info.get("lfs")
    return None if lfs is None else PREFIX + lfs["sha256"]


def find_config(model: HubAddress) -> HubFile | None:
    """Returns the configuration that belongs to a model, None if its repository has none.

    Raises:
        SourceError: There is no access to the repository.
        TransferError: The Hub does not answer right now.
    """
    beside = posixpath.join(posixpath.dirname(model.path), CONFIG_FILE)
    with _explained(model):
        filesystem = _client().HfFileSystem(skip_instance_cache=True)
        for path in dict.fromkeys((beside, CONFIG_FILE)):
            with suppress(FileNotFoundError):
                if filesystem.info(str(model.at(path)).removeprefix("hf://"))["type"] == "file":
                    return HubFile(model.at(path))
    return None


def pin(address: HubAddress) -> HubAddress:
    """Returns the same file of the commit that its revision names now.

    This machine remembers the answer for when the Hub cannot be reached, and logs at WARNING when it goes by
    that.

    Raises:
        SourceError: There is no such repository or revision, no access to it, the Hub's answer is no commit,
            or the Hub cannot be reached and was never asked before.
        MissingExtraError: The Hub's client is not installed.
    """
    if address.commit is not None:
        return address
    entry = _entry(address)
    try:
        commit = _resolve_commit(address)
    except TransferError as error:
        commit = (read_entry(entry, max_bytes=_COMMIT_BYTES) or b"").decode("ascii", errors="replace")
        if not is_commit(commit):
            raise SourceError(
                f"cannot reach the Hub: {address}\n  {error}",
                hint="run the command again later, or download the file by hand and use source: {path: …}",
            ) from error
        log.warning("%s: cannot reach the Hub; using the last known commit, %s", address, commit)
    else:
        try:
            write_entry(entry, commit.encode("ascii"))
        except OSError as error:
            log.debug("cache entry %s is not usable: %s", entry, error)
    return replace(address, revision=commit)


def _resolve_commit(address: HubAddress) -> str:
    client = _client()
    kind, _, rest = address.repository.partition("/")
    with _explained(address):
        info = client.HfApi().repo_info(
            rest if kind in _KINDS else address.repository,
            repo_type=_KINDS.get(kind),
            revision=address.revision,
            timeout=client.constants.HF_HUB_ETAG_TIMEOUT,
        )
    if not is_commit(str(info.sha)):
        raise SourceError(
            f"unexpected answer from the Hub: {address}\n  expected a commit, got {str(info.sha)[:80]!r}"
        )
    return str(info.sha)


def _entry(address: HubAddress) -> str | None:
    folder = cache_folder("hub")
    whole = replace(address, path="")
    key = {"endpoint": _client().constants.ENDPOINT, "revision": str(whole)}
    return None if folder is None else f"{folder}/{digest_json(key).removeprefix(PREFIX)}"


def _client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingExtraError(
            "hf:// URLs need huggingface_hub, which is not installed", hint=install_command("hub")
        ) from error
    for logger in ("httpx", "httpx2"):
        hide_queries_in_logs(logger)
    return huggingface_hub


@contextmanager
def _explained(address: HubAddress) -> Iterator[None]:
    """Turns what the Hub's client raises into a `SourceError` or a `TransferError`.

    Its own messages are left out: they quote signed URLs of the servers behind the Hub.
    """
    errors = _client().errors
    try:
        yield
    except (OSError, ValueError, RuntimeError, errors.HfHubHTTPError.__bases__[0]) as error:
        # The file system makes a `FileNotFoundError` of what the client raised.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
        raise _explain(cause or error, address, errors) from None


def _explain(error: BaseException, address: HubAddress, errors: Any) -> SourceError | TransferError:
    repository = address.repository
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"no access to a gated repository: {repository}\n"
            "  expected a token whose owner accepted its terms",
            hint=f"accept the terms on the page of {quoted(repository)}, then: {_LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"no such revision: {address.revision} of {repository}\n  expected a branch, tag or commit",
            hint="list them on the repository's page, below “Files”",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"no such repository, or no access to it: {repository}\n"
            "  expected a public one, or one that the token may read",
            hint=_LOGIN,
        )
    if isinstance(error, errors.EntryNotFoundError | FileNotFoundError):
        return SourceError(f"no such file on the Hub: {address}\n  expected a file, got none")
    if isinstance(error, IsADirectoryError):
        return SourceError(f"cannot fetch: {address}\n  expected a file, got a folder")
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error.response.status_code, address)
    if isinstance(error, ValueError):
        return SourceError(f"cannot fetch: {address}\n  {first_line(error)}")
    return TransferError(f"no answer from the Hub: {first_line(error)}")


def _explain_status(status: int, address: HubAddress) -> SourceError | TransferError:
    if status >= 500 or status in _RETRIED_STATUS:
        return TransferError(f"HTTP {status}")
    hint = _LOGIN if status in (401, 403) else None
    return SourceError(f"cannot fetch: {address}\n  expected HTTP 200, got HTTP {status}", hint=hint)
