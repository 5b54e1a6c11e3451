"""Sources of the files of a model: this machine, or the Hugging Face Hub.

A file of the Hub is downloaded by the Hub's own client, past its cache, which others may write to. The client
limits neither time nor size, and unpacks what a server sends: it runs in a process that the kernel limits. A
branch can move, so a revision is resolved to a commit first, and every file is read from that commit.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import posixpath
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ortprep.bundle.digest import PREFIX, DigestCache, digest_file
from ortprep.bundle.file_memory import open_regular, read_stamp
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import describe_file
from ortprep.children.child import run_child
from ortprep.errors import DISK_ERRORS, ChildTimeoutError, MissingExtraError, RegistryError, SourceError
from ortprep.runtime.machine.memory import available_bytes
from ortprep.spec.urls import HubAddress, is_commit
from ortprep.stages.fetch.inspection import find_beside
from ortprep.transport.time_limit import check_time, limit_time, remaining_s
from ortprep.transport.transfer import read_blocks, read_limit
from ortprep.versions import install_command

Q = TypeVar("Q")
R = TypeVar("R")

TIMEOUT_VARIABLE = "ORTPREP_FETCH_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 6 * 3600
"""Longest time for a whole file in seconds, unless the environment has another one."""

ANSWER_TIMEOUT_S = 120.0
"""Longest time in seconds for what the Hub says of a file."""

_MIN_FILE_BYTES = 2**20
"""What the client's own small files may take, in bytes."""

_KINDS = {"datasets": "dataset", "spaces": "space"}
_SHA256 = re.compile("[0-9a-f]{64}")
_LOGIN = "hf auth login   # or set HF_TOKEN"
_LATER = "run the command again later, or download the file by hand and use source: {path: …}"

_REFUSALS = (
    (
        "GatedRepoError",
        "no access to a gated repository: {0.repository}",
        f"accept the terms on the repository's page, then: {_LOGIN}",
    ),
    ("RevisionNotFoundError", "no such revision: {0.revision} of {0.repository}", None),
    ("RepositoryNotFoundError", "no such repository, or no access to it: {0.repository}", _LOGIN),
    ("LocalEntryNotFoundError", "cannot reach the Hub: {0}", _LATER),
    ("EntryNotFoundError", "no such file on the Hub: {0}", None),
)
"""Errors of the client, those of a kind before the kind, what they mean, and advice."""


@contextmanager
def limit_fetch(name: str) -> Iterator[None]:
    """Gives a block the time of a whole file; `SourceError` says that it took longer."""
    try:
        timeout_s = read_limit(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
    except RegistryError as error:
        raise SourceError(error.message) from error
    late = SourceError(
        f"took too long: {name}\n  expected {timeout_s} s at most",
        hint=f"export {TIMEOUT_VARIABLE}=SECONDS, or copy the file and use source: {{path: …}}",
    )
    with limit_time(timeout_s, late):
        yield


def require_size(size_bytes: int, max_bytes: int, name: str) -> None:
    """Raises `SourceError` for a file that is larger than it may be."""
    if size_bytes > max_bytes:
        raise SourceError(f"too large: {name}\n  expected at most {max_bytes} bytes, got {size_bytes}")


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine; links are followed."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def copy_to(self, place: Path, max_bytes: int, progress: Callable[[float], None]) -> FileEntry:
        """Copies the file, and returns size and digest of what was written, under the name of `place`.

        Raises:
            SourceError: It cannot be read, is larger than `max_bytes`, changed meanwhile, or takes too long.
            OSError: `place` cannot be written.
        """
        try:
            before = read_stamp(self.path)
            open_regular(self.path).close()
        except OSError as error:
            raise SourceError(f"cannot read {self.name}\n  {error.strerror}") from error
        require_size(before[2], max_bytes, self.name)
        hasher, size_bytes = hashlib.sha256(), 0
        with place.open("wb") as file:
            for block in read_blocks(self.path):
                file.write(block)
                hasher.update(block)
                size_bytes += len(block)
                check_time()
                require_size(size_bytes, before[2], self.name)
                progress(size_bytes / before[2])
        if read_stamp(self.path) != before:
            raise SourceError(f"file changed while it was read: {self.name}", hint="run the command again")
        digest = PREFIX + hasher.hexdigest()
        DigestCache().record(place, digest)
        return describe_file(place, place.name)

    def beside(self, location: str) -> LocalFile:
        """Returns a file below this one's folder; raises SourceError for none, and for a link out of it."""
        return LocalFile(find_beside(self.path, location))


@dataclass(frozen=True)
class HubFile:
    """A file of one commit, which its address has."""

    address: HubAddress

    @property
    def name(self) -> str:
        """The URL."""
        return str(self.address)

    def copy_to(self, place: Path, max_bytes: int, progress: Callable[[float], None]) -> FileEntry:  # noqa: ARG002
        """Downloads the file; as `LocalFile.copy_to`, without progress.

        Raises:
            SourceError: It is not there, is larger, or other than the Hub says, or takes too long.
            MissingExtraError: The Hub's client is not installed.
        """
        return _run_client(download_from_hub, (self.address, place.resolve(), max_bytes), remaining_s())

    def beside(self, location: str) -> HubFile:
        """Returns a file of the same commit in this one's folder, or below it."""
        path = posixpath.join(posixpath.dirname(self.address.path), location)
        return HubFile(replace(self.address, path=path))


Source = LocalFile | HubFile


def pin(address: HubAddress) -> HubAddress:
    """Returns the same file of the commit that its revision names now.

    Raises:
        SourceError: There is no such file or revision, no access to it, the Hub cannot be reached, or its
            answer is no commit.
        MissingExtraError: The Hub's client is not installed.
    """
    if address.commit is not None:
        return address
    try:
        return replace(address, revision=_run_client(read_commit, address, ANSWER_TIMEOUT_S))
    except ChildTimeoutError as error:
        raise SourceError(f"cannot reach the Hub: {address}\n  no answer in time", hint=_LATER) from error


def _run_client(function: Callable[[Q], R], request: Q, timeout_s: float) -> R:
    """Returns what a function says that uses the Hub's client, in a child process."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError(
            "hf:// URLs need huggingface_hub, which is not installed", hint=install_command("hub")
        )
    try:
        return run_child(function, request, timeout_s=timeout_s, memory_bytes=available_bytes()).value
    except ChildTimeoutError:
        check_time()
        raise


def read_commit(address: HubAddress) -> str:
    """Child function of `pin`: returns the commit of a file."""
    with _client(address) as client:
        commit = str(_describe(client, address).commit_hash)
    if not is_commit(commit):
        raise SourceError(
            f"unexpected answer from the Hub: {address}\n  expected a commit, got {commit[:80]!r}"
        )
    return commit


def download_from_hub(request: tuple[HubAddress, Path, int]) -> FileEntry:
    """Child function of `HubFile.copy_to`: the file, its place to be, and how large it may be in bytes."""
    address, place, max_bytes = request
    with _client(address) as client:
        found, folder = _describe(client, address), place.with_name(".download")
        require_size(found.size or 0, max_bytes, str(address))
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(max_bytes, _MIN_FILE_BYTES),) * 2)
        options = {"local_dir": folder, "cache_dir": folder / "cache"}
        Path(client.hf_hub_download(**_place_of(address), **options)).replace(place)
        shutil.rmtree(folder)
    digest, size_bytes = digest_file(place), place.stat().st_size
    # The tag of a large file is its digest; of small ones the Hub knows git's own.
    expected = PREFIX + found.etag if _SHA256.fullmatch(found.etag or "") else digest
    if (digest, size_bytes) != (expected, found.size):
        raise SourceError(
            f"other bytes than the Hub says: {address}\n  expected {expected}, {found.size} bytes, "
            f"got {digest}, {size_bytes} bytes",
            hint=_LATER,
        )
    DigestCache().record(place, digest)
    return describe_file(place, place.name)


def _place_of(address: HubAddress) -> dict[str, Any]:
    """Returns what the Hub's client calls a file by."""
    kind, _, rest = address.repository.partition("/")
    return {
        "repo_id": rest if kind in _KINDS else address.repository,
        "filename": address.path,
        "repo_type": _KINDS.get(kind),
        "revision": address.revision,
    }


def _describe(client: Any, address: HubAddress) -> Any:
    """Returns what the Hub says of a file: commit, size, and tag."""
    return client.get_hf_file_metadata(client.hf_hub_url(**_place_of(address)))


@contextmanager
def _client(address: HubAddress) -> Iterator[Any]:
    """Yields the Hub's client, which logs nothing, and raises `SourceError` for a file.

    The messages of the client are left out: they quote signed URLs of the servers behind the Hub.
    """
    import huggingface_hub
    from huggingface_hub import errors

    logging.disable()
    try:
        yield huggingface_hub
    # The client's base of HTTP errors is that of its HTTP library, which depends on its version.
    except (OSError, ValueError, RuntimeError, errors.HfHubHTTPError.__bases__[0]) as error:
        # A file that is too large is the Hub's fault, and no full disk.
        if isinstance(error, OSError) and error.errno in DISK_ERRORS - {errno.EFBIG}:
            raise
        raise _explain(error, address, errors) from None


def _explain(error: BaseException, address: HubAddress, errors: Any) -> SourceError:
    """Returns what to raise for an error of the Hub's client."""
    for name, message, hint in _REFUSALS:
        if isinstance(error, getattr(errors, name)):
            return SourceError(message.format(address), hint=hint)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return SourceError(f"too large: {address}\n  expected as many bytes as the Hub says, got more")
    reason = (str(error) or type(error).__name__).splitlines()[0][:300]
    if isinstance(error, errors.HfHubHTTPError):
        reason = f"got HTTP {error.response.status_code}"
    what = "cannot fetch" if isinstance(error, ValueError) else "cannot reach the Hub"
    return SourceError(f"{what}: {address}\n  {reason}", hint=_LATER)
