"""Downloads of blobs from an OCI registry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import IntegrityError, RegistryError, RegistryUnavailableError
from pipeline.registry.backends.oci.requests import Request

if TYPE_CHECKING:
    import requests

    from pipeline.registry.backends.oci.client import OciClient

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-")


@contextmanager
def open_blob(client: OciClient, repository: str, entry: FileEntry, offset: int) -> Iterator[Iterator[bytes]]:
    """Yields the blocks of a file from `offset` on.

    Raises:
        NotPublishedError: It is not there.
        IntegrityError: There are more bytes than `entry` says.
        RegistryError: The registry fails.
    """
    # Registries cut off what they answer to a range that begins at the end.
    if 0 < entry.size_bytes <= offset:
        yield iter(())
        return
    request = Request(
        "GET",
        f"blobs/{entry.sha256}",
        f"read {entry.path}",
        repository,
        headers={"Range": f"bytes={offset}-"} if offset else {},
        expected=(200, 206),
    )
    response = client.open(request)
    try:
        yield _read(client, response, request, entry, offset)
    finally:
        response.close()


def _read(
    client: OciClient, response: requests.Response, request: Request, entry: FileEntry, offset: int
) -> Iterator[bytes]:
    place = f"{client.host}/{request.repository}"
    if response.status_code == 206:
        found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != offset:
            raise RegistryError(f"cannot {request.doing}: {place}\n  got other bytes than were asked for")
    position = offset if response.status_code == 206 else 0
    for block in client.blocks(response, request):
        wanted = block[max(offset - position, 0) :]
        position += len(block)
        if position > entry.size_bytes:
            raise IntegrityError(
                f"too many bytes for {entry.path}\n  expected {entry.size_bytes} bytes, got more"
            )
        if wanted:
            yield wanted
    if position < entry.size_bytes:
        raise RegistryUnavailableError(
            f"cannot {request.doing}: {place}\n  expected {entry.size_bytes} bytes, got {position}"
        )
