"""Manifests and tags of one repository of an OCI registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.bundle.codec import parse_json
from pipeline.bundle.digest import digest_bytes, is_digest
from pipeline.errors import BundleError, IntegrityError, NotPublishedError, RegistryError
from pipeline.registry.backends.oci.documents import INDEX, MANIFEST, Document
from pipeline.registry.backends.oci.requests import Request

if TYPE_CHECKING:
    from pipeline.registry.backends.oci.client import OciClient

_MAX_MANIFEST_BYTES = 8 * 1024 * 1024
_HALF_WRITTEN = frozenset({"DIGEST_INVALID"})
"""What a registry says of a manifest put by tag, which has no digest to be wrong: it read one of its own
links while another push wrote it (CNCF Distribution 2.8 on a file system does not replace them at once)."""
_ACCEPT = {"Accept": f"{MANIFEST}, {INDEX}"}


class Manifests:
    """The manifests of a repository; every method may raise what `OciClient.fetch` does.

    Args:
        client: The registry.
        repository: The repository.
    """

    def __init__(self, client: OciClient, repository: str) -> None:
        self._client = client
        self._repository = repository

    def list_tags(self) -> tuple[str, ...]:
        """Returns all tags; none for a repository that is not there."""
        request = Request("GET", "tags/list?n=1000", "list the tags", self._repository)
        try:
            return tuple(dict.fromkeys(self._client.list_names(request, "tags")))
        except NotPublishedError:
            return ()

    def digest_of(self, tag: str) -> str:
        """Returns the digest that a tag names now, "" if there is no such tag."""
        request = Request(
            "HEAD",
            f"manifests/{tag}",
            "look up a tag",
            self._repository,
            headers=_ACCEPT,
            expected=(200, 404),
        )
        answer = self._client.fetch(request)
        if answer.status == 404:
            return ""
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_digest(digest) else digest_bytes(self._fetch(tag))

    def read(self, tag: str) -> dict[str, Any]:
        """Returns the manifest that a tag names.

        Raises:
            NotPublishedError: There is no such tag.
            IntegrityError: It names no JSON object.
        """
        try:
            return parse_json(self._fetch(tag), name=tag)
        except BundleError:
            raise IntegrityError(f"no manifest: {tag} in {self._client.host}/{self._repository}") from None

    def read_index(self, tag: str) -> tuple[str, frozenset[str]]:
        """Returns the digest of what a tag names, and the digests of the manifests that it lists."""
        try:
            body = self._fetch(tag)
            entries = parse_json(body, name=tag).get("manifests")
        except (NotPublishedError, BundleError):
            return "", frozenset()
        listed = [one.get("digest") for one in _as_list(entries) if isinstance(one, dict)]
        return digest_bytes(body), frozenset(one for one in listed if isinstance(one, str))

    def put(self, tag: str, document: Document) -> None:
        """Pushes a manifest under a tag, unless the tag names it already."""
        if self.digest_of(tag) == document.digest:
            return
        request = Request(
            "PUT",
            f"manifests/{tag}",
            "push a manifest",
            self._repository,
            headers={"Content-Type": document.media_type},
            body=document.data,
            expected=(201,),
            passing=_HALF_WRITTEN,
        )
        digest = self._client.fetch(request).headers.get("Docker-Content-Digest", document.digest)
        if digest != document.digest:
            raise RegistryError(
                f"registry keeps another manifest: {tag} in {self._client.host}/{self._repository}\n"
                f"  expected {document.digest}, got {digest[:80]!r}"
            )

    def delete(self, digest: str) -> None:
        """Removes a manifest and its tags; one that is not there is fine."""
        request = Request(
            "DELETE",
            f"manifests/{digest}",
            "delete a manifest",
            self._repository,
            expected=(200, 202, 204, 404, 405),
        )
        answer = self._client.fetch(request)
        if answer.status == 405 or b'"UNSUPPORTED"' in answer.body:
            raise RegistryError(
                f"deletion is switched off: {self._client.host}/{self._repository}\n"
                f"  expected the manifest to go, got status {answer.status}",
                hint="ask who runs the registry; for CNCF Distribution, REGISTRY_STORAGE_DELETE_ENABLED=true",
            )

    def _fetch(self, tag: str) -> bytes:
        request = Request(
            "GET",
            f"manifests/{tag}",
            "read a manifest",
            self._repository,
            headers=_ACCEPT,
            limit_bytes=_MAX_MANIFEST_BYTES,
        )
        return self._client.fetch(request).body


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
