"""Tags, manifests and blobs of one repository of an OCI registry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urljoin

import requests

from ortprep.bundle.codec import parse_json
from ortprep.bundle.digest import digest_bytes, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import (
    BundleError,
    IntegrityError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from ortprep.quoting import quoted
from ortprep.registry.backend import Download
from ortprep.registry.backends.oci.client import OciClient
from ortprep.registry.backends.rest import MAX_ERROR_BYTES, open_file, read_body, read_refusal, status_error
from ortprep.registry.documents import INDEX, MANIFEST, MAX_DOCUMENT_BYTES
from ortprep.registry.retries import with_retries

_ACCEPT = {"Accept": f"{MANIFEST}, {INDEX}"}
_ACCESS = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}
_MAX_PAGE_BYTES = 32 * 1024 * 1024
_MAX_PAGES = 10_000
_MAX_NAMES = 80_000
_CODE = re.compile(r"[A-Z][A-Z_]{0,63}")
_HALF_WRITTEN = "DIGEST_INVALID"
"""What a registry says of a manifest put by tag, which has no digest to be wrong: it read one of its own
links while another push wrote it (CNCF Distribution 2.8 on a file system does not replace them at once)."""


class Repository:
    """One repository; the name "" stands for the registry itself.

    Every method raises RegistryError, by kind, for no answer or an unexpected one.
    """

    def __init__(self, client: OciClient, name: str) -> None:
        self._client = client
        self._name = name
        self.place = f"{client.host}/{name}".rstrip("/")

    def fetch(self, method: str, path: str, doing: str, **options: Any) -> tuple[requests.Response, bytes]:
        """Asks as `ask` does, again while the registry is unavailable."""
        return with_retries(lambda: self.ask(method, path, doing, **options))

    def ask(
        self, method: str, path: str, doing: str, *, limit_bytes: int = MAX_ERROR_BYTES, **options: Any
    ) -> tuple[requests.Response, bytes]:
        """Asks once, as `open` does; returns the answer and its body."""
        with self.open(method, path, doing, **options) as response:
            return response, read_body(response, f"{doing}: {self.place}", limit_bytes)

    def open(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> requests.Response:
        """Asks once, and returns the answer with its body unread; the caller closes it.

        The path is below the repository, or a whole URL that the registry gave; `doing` says what it is for,
        as in "list the tags"; `expected` are the statuses that are no error.
        """
        base, doing = self._client.base, f"{doing}: {self.place}"
        url = urljoin(f"{base}{self._name}/" if self._name else base, path)
        scope = self._name, _ACCESS.get(method, "push")
        sent_headers = {"Accept-Encoding": "identity", **(headers or {})}
        response = self._client.send(requests.Request(method, url, sent_headers, data=body), doing, scope)
        if response.status_code in expected:
            return response
        with response:
            code = _code_in(read_refusal(response, doing))
        error = status_error(response, doing, said=code, hint=f"docker login {quoted(self._client.host)}")
        raise RegistryUnavailableError(error.message) if code == _HALF_WRITTEN else error

    def resolve(self, location: str | None) -> str:
        """Returns the URL that a header of an answer names; see `OciClient.resolve`."""
        return self._client.resolve(location, f"continue: {self.place}")

    def list_names(self, path: str, field_name: str) -> list[str]:
        """Returns the names that a list has in a field, from all of its pages."""
        names: list[str] = []
        doing = f"list {field_name}"
        for _ in range(_MAX_PAGES):
            answer, body = self.fetch("GET", path, doing, limit_bytes=_MAX_PAGE_BYTES)
            names += self._names_in(body, field_name)
            links = requests.utils.parse_header_links(answer.headers.get("Link", ""))
            following = next((link["url"] for link in links if link.get("rel") == "next"), "")
            if not following:
                return names
            url = self.resolve(following)
            if not self._client.is_own(url) or url == path:
                raise self._unexpected(doing, "its own pages", "a bad next page")
            if len(names) > _MAX_NAMES:
                break
            path = url
        raise self._unexpected(doing, f"at most {_MAX_NAMES} names", "more")

    def _names_in(self, body: bytes, field_name: str) -> list[str]:
        try:
            names = parse_json(body, name="the answer").get(field_name) or []
        except BundleError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._unexpected(f"list {field_name}", "a list of names", "something else")
        return names

    def _unexpected(self, doing: str, expected: str, got: str) -> RegistryError:
        return RegistryError(f"cannot {doing}: {self.place}\n  expected {expected}, got {got}")

    def list_tags(self) -> tuple[str, ...]:
        """Returns all tags; none for a repository that is not there."""
        try:
            return tuple(dict.fromkeys(self.list_names("tags/list?n=1000", "tags")))
        except NotPublishedError:
            return ()

    def digest_of(self, tag: str) -> str:
        """Returns the digest that a tag names now, "" if there is no such tag."""
        path = f"manifests/{tag}"
        answer, _ = self.fetch("HEAD", path, "look up a tag", headers=_ACCEPT, expected=(200, 404))
        if answer.status_code == 404:
            return ""
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_digest(digest) else digest_bytes(self.read_manifest(tag))

    def read_manifest(self, name: str) -> bytes:
        """Returns the bytes of the manifest that a tag or a digest names, unchecked."""
        path, limit = f"manifests/{name}", MAX_DOCUMENT_BYTES
        return self.fetch("GET", path, "read a manifest", headers=_ACCEPT, limit_bytes=limit)[1]

    def put_manifest(self, name: str, data: bytes, media_type: str) -> None:
        """Pushes a manifest under a tag or its digest, unless that names it already."""
        expected = digest_bytes(data)
        if self.digest_of(name) == expected:
            return
        kind, path = {"Content-Type": media_type}, f"manifests/{name}"
        answer, _ = self.fetch("PUT", path, "push a manifest", headers=kind, body=data, expected=(201,))
        digest = answer.headers.get("Docker-Content-Digest", expected)
        if digest != expected:
            raise self._unexpected(f"push {name}", f"it to be stored as {expected}", repr(digest[:80]))

    def delete_manifest(self, digest: str) -> None:
        """Removes a manifest and its tags; one that is not there is fine."""
        expected = (200, 202, 204, 404, 405)
        answer, body = self.fetch("DELETE", f"manifests/{digest}", "delete a manifest", expected=expected)
        if answer.status_code == 405 or b'"UNSUPPORTED"' in body:
            raise RegistryError(
                f"deletion is switched off: {self.place}\n"
                f"  expected success, got status {answer.status_code}",
                hint="ask the registry's operator; for CNCF Distribution, "
                "REGISTRY_STORAGE_DELETE_ENABLED=true",
            )

    def has_blob(self, digest: str) -> bool:
        """Says whether a blob is there."""
        answer, _ = self.fetch("HEAD", f"blobs/{digest}", "look for a file", expected=(200, 404))
        return answer.status_code == 200

    def read_blob(self, digest: str) -> bytes:
        """Returns a small blob; raises IntegrityError if it has other bytes."""
        limit = MAX_DOCUMENT_BYTES
        _, data = self.fetch("GET", f"blobs/{digest}", "read a document", limit_bytes=limit)
        if digest_bytes(data) != digest:
            raise IntegrityError(f"other bytes than recorded: {digest} in {self.place}")
        return data

    def open_blob(self, entry: FileEntry, offset: int) -> AbstractContextManager[Download]:
        """Opens a file at an offset, or at 0."""
        path, doing = f"blobs/{entry.sha256}", f"read {entry.path}"

        def ask(headers: Mapping[str, str]) -> requests.Response:
            return self.open("GET", path, doing, headers=headers, expected=(200, 206))

        return open_file(ask, f"{doing}: {self.place}", offset)


def _code_in(refusal: Mapping[str, Any]) -> str:
    """Returns the code of the first error that a registry tells, "" if there is none."""
    errors = refusal.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    code = first.get("code") if isinstance(first, dict) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""
