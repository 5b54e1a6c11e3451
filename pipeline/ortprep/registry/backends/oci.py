"""Bundles in OCI registries: Harbor, GHCR, ECR, Artifactory, GitLab, CNCF Distribution and all the others.

A model is a repository. A part is an image manifest, a version is an image index with its label as a tag, an
alias is any other tag of an index. Tags that begin with `_` are ours: `_v.`, `_b.`, `_s.` and `_p.`, and the
names of refs to versions, to parts, to signatures, which have their part as subject, and to what aliases
named before. A part's tag ends in the time at which a publisher relied on it, in seconds. Without a tag, a
registry's own garbage collection could take it, although versions list it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from ortprep.bundle.codec import parse_json
from ortprep.bundle.digest import PREFIX, digest_bytes, digest_file, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.errors import BundleError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backend import (
    MAX_LISTING_BYTES,
    POINTERS,
    Backend,
    Kind,
    SweepResult,
    digest_of,
    digests_of,
    ref_name,
)
from ortprep.registry.backends.oci_auth import OciClient
from ortprep.registry.documents import EMPTY, INDEX, MANIFEST, MAX_DOCUMENT_BYTES, Part, parse_part
from ortprep.spec.urls import redact_url
from ortprep.transport import http_answers
from ortprep.transport.transfer import Download, check_copied, map_parallel, with_retries

_OWN = "_"
_PREFIXES = {
    Kind.VERSION: "_v.",
    Kind.PART: "_b.",
    Kind.SIGNATURE: "_s.",
    Kind.PREVIOUS: "_p.",
    Kind.ALIAS: "",
}
_PART_TAG = re.compile(r"_b\.(?P<hex>[0-9a-f]{64})\.(?P<at_s>[0-9]{1,12})")
_ACCEPT = {"Accept": f"{MANIFEST}, {INDEX}"}
_MAX_PAGE_BYTES = 32 * 1024 * 1024
_MAX_PAGES, _MAX_NAMES = 10_000, 80_000
_MAX_REPOSITORY_LENGTH = 255
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_MODEL = re.compile(_COMPONENT)
_URL = re.compile(
    r"(?i:oci(?P<plain>\+http)?)://"
    r"(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?)"
    rf"(?:/(?P<prefix>{_COMPONENT}(?:/{_COMPONENT})*))?/*"
)
_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


class OciBackend(Backend):
    """Models in the repositories of an OCI registry; see `Backend`. Credentials are those of `docker login`.

    Args:
        url: `oci://HOST[:PORT]/PREFIX`, or `oci+http://…` for a registry without TLS.
        timeout_s: Longest wait for a connection, and for the next bytes of an answer.

    Raises:
        RegistryError: The URL is not of that form.
    """

    def __init__(self, url: str, *, timeout_s: tuple[float, float] = (10, 60)) -> None:
        place = _URL.fullmatch(url)
        if place is None:
            raise RegistryError(
                f"not an OCI registry's URL: {redact_url(url)[:200]}\n"
                "  expected oci://HOST[:PORT]/PREFIX, or oci+http://… without TLS, PREFIX in lower case"
            )
        self.url = url
        self._prefix = f"{place['prefix']}/" if place["prefix"] else ""
        self._host = _HUB.get(place["host"], place["host"])
        self._client = OciClient(self._host, secure=not place["plain"], timeout_s=timeout_s)

    def close(self) -> None:
        self._client.close()

    def has_file(self, part: Part, entry: FileEntry) -> bool:
        return self._has_blob(part.model, entry.sha256)

    def _has_blob(self, model: str, digest: str) -> bool:
        path, expected = f"blobs/{digest}", (200, 404)
        return self._fetch("HEAD", model, path, "look for a file", expected=expected)[0].status_code == 200

    def open_file(self, part: Part, entry: FileEntry, offset: int = 0) -> AbstractContextManager[Download]:
        return self._open(part.model, f"blobs/{entry.sha256}", entry.path, offset)

    def open_ref(self, model: str, kind: Kind, name: str) -> AbstractContextManager[Download]:
        return self._open(model, f"manifests/{digest_of(name)}", f"{kind}/{name}", 0)

    def _open(self, model: str, path: str, name: str, offset: int) -> AbstractContextManager[Download]:
        """Opens a blob or a manifest; messages call it `name`."""
        url, place = self._locate(model, path)
        doing = f"read {name}: {place}"

        def ask(headers: Mapping[str, str]) -> requests.Response:
            options: dict[str, Any] = {"expected": (200, 206), "follows": True}
            return self._client.open("GET", url, doing, headers=_ACCEPT | dict(headers), **options)

        return http_answers.open_file(ask, doing, offset)

    def put_file(self, part: Part, entry: FileEntry, source: Path) -> None:
        self._upload(part.model, entry, source)

    def _upload(self, model: str, entry: FileEntry, source: Path) -> None:
        """Uploads a file in one request, again from its beginning while the registry is unavailable."""
        url, place = self._locate(model, "blobs/uploads/")
        doing = f"upload {entry.path}: {place}"
        if source.stat().st_size != entry.size_bytes:
            check_copied(entry, source.stat().st_size, digest_file(source))

        def send() -> None:
            begun, _ = self._client.ask("POST", url, doing, expected=(202,))
            location = self._client.resolve(begun.headers.get("Location"), doing)
            mark = "&" if "?" in location else "?"
            target = f"{location}{mark}digest={quote(entry.sha256, safe='')}"
            answer = self._client.put_file(target, doing, source, expected=(201, 204, 400, 404, 416))
            if answer.status_code not in (201, 204):
                # Other bytes arrived, or the registry lost the upload.
                check_copied(entry, source.stat().st_size, digest_file(source))
                raise RegistryUnavailableError(
                    f"cannot {doing}\n  expected success, got status {answer.status_code}"
                )

        with_retries(send)

    def list_refs(self, model: str, kind: Kind) -> Mapping[str, str]:
        """Returns the refs of a kind, but to parts; versions that another tool copied here are among them."""
        if kind == Kind.PART:
            return {}
        tags = self._list_tags(model)
        plain = [tag for tag in tags if not tag.startswith(_OWN)]
        start = _PREFIXES[kind]
        own = plain if kind == Kind.ALIAS else [tag for tag in tags if tag.startswith(start)]
        if kind in POINTERS:
            return {tag.removeprefix(start): digest for tag, digest in self._read_tags(model, own).items()}
        refs = digests_of(tag.removeprefix(start) for tag in own)
        if kind == Kind.VERSION:
            labels = {name.partition(".")[2] for name in refs}
            others = self._read_tags(model, [tag for tag in plain if tag not in labels])
            refs |= {ref_name(digest): digest for digest in {*others.values()} - {*refs.values()}}
        return refs

    def _list_tags(self, model: str) -> list[str]:
        try:
            return self._list_names(self._locate(model, "tags/list?n=1000")[0], "tags")
        except NotPublishedError:
            return []

    def _read_tags(self, model: str, tags: Collection[str]) -> dict[str, str]:
        digests = map_parallel(lambda tag: self._digest_of(model, tag), tags)
        return {tag: digest for tag, digest in digests.items() if digest}

    def put_ref(self, model: str, kind: Kind, name: str, data: bytes) -> None:
        """Pushes a document under its tag; a part each time under another one, which says when."""
        if kind == Kind.VERSION or kind in POINTERS:
            self._put_manifest(model, _PREFIXES[kind] + name, data, INDEX)
            return
        self._put_empty(model)
        at = f".{int(time.time())}" if kind == Kind.PART else ""
        self._put_manifest(model, f"{_PREFIXES[kind]}{name}{at}", data, MANIFEST)

    def put_label(self, model: str, label: str, data: bytes) -> None:
        self._put_manifest(model, label, data, INDEX)

    def _put_empty(self, model: str) -> None:
        """Uploads the configuration of a manifest without one."""
        entry = FileEntry("an empty document", len(EMPTY), digest_bytes(EMPTY))
        if not self._has_blob(model, entry.sha256):
            with scratch_folder("ortprep-empty-") as folder:
                file = folder / "empty.json"
                file.write_bytes(EMPTY)
                self._upload(model, entry, file)

    def _put_manifest(self, model: str, tag: str, data: bytes, media_type: str) -> None:
        """Pushes a manifest under a tag or its digest, unless that names it already."""
        digest = digest_bytes(data)
        if self._digest_of(model, tag) == digest:
            return
        url, place = self._locate(model, f"manifests/{tag}")
        doing, headers = f"push a manifest: {place}", {"Content-Type": media_type}

        def push() -> requests.Response:
            return self._client.ask("PUT", url, doing, headers=headers, data=data, expected=(201,))[0]

        answer = with_retries(push)
        got = answer.headers.get("Docker-Content-Digest", digest)
        if got != digest:
            raise self._unexpected(f"push {tag}", f"it to be stored as {digest}", repr(got[:80]))

    def _digest_of(self, model: str, tag: str) -> str:
        """Returns the digest that a tag or a digest names now, "" if there is none."""
        path, doing = f"manifests/{tag}", "look up a tag"
        answer, _ = self._fetch("HEAD", model, path, doing, headers=_ACCEPT, expected=(200, 404))
        if answer.status_code == 404:
            return ""
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_digest(digest) else digest_bytes(self._read_manifest(model, tag))

    def _read_manifest(self, model: str, name: str) -> bytes:
        path, limit = f"manifests/{name}", MAX_DOCUMENT_BYTES
        return self._fetch("GET", model, path, "read a manifest", headers=_ACCEPT, limit_bytes=limit)[1]

    def delete_version(self, model: str, name: str) -> None:
        """Removes a document with all of its tags, since registries delete by digest."""
        for digest in digests_of([name]).values():
            self._delete_manifest(model, digest)

    def _delete_manifest(self, model: str, digest: str) -> None:
        """Deletes a manifest with all of its tags; raises RegistryError if deletion is switched off."""
        path, expected = f"manifests/{digest}", (200, 202, 204, 404, 405)
        answer, body = self._fetch("DELETE", model, path, "delete a manifest", expected=expected)
        if answer.status_code == 405 or b'"UNSUPPORTED"' in body:
            raise RegistryError(
                f"deletion is switched off: {self._locate(model, '')[1]}\n"
                f"  expected success, got status {answer.status_code}",
                hint="ask the registry's operator; for CNCF Distribution, "
                "REGISTRY_STORAGE_DELETE_ENABLED=true",
            )

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models with at least one version, sorted."""
        try:
            repositories = self._list_names("_catalog?n=1000", "repositories")
        except RegistryUnavailableError:
            raise
        except RegistryError as error:
            raise type(error)(
                f"registry does not list its models: {self._host}\n{error.message}",
                hint=f"ortprep versions NAME --registry {quoted(self.url)}",
            ) from None
        names = [name.removeprefix(self._prefix) for name in repositories if name.startswith(self._prefix)]
        models = sorted({name for name in names if _MODEL.fullmatch(name)})
        listed = map_parallel(self._list_tags, models)
        return tuple(
            model
            for model, tags in listed.items()
            if any(tag.startswith(_PREFIXES[Kind.VERSION]) for tag in tags)
        )

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Deletes parts that no version has; their files go with the registry's own garbage collection."""
        live_digests = {part.digest for part in live}
        unused = [digest for digest in self._list_old_parts(model, grace_s) if digest not in live_digests]
        # A tag may name anything: only what is a part is deleted, and no version or signature.
        parts = {digest for digest in unused if self._is_part(model, digest)}
        if parts and not dry_run:
            # Looked at again: a publisher may have refreshed one since the tags were listed.
            parts &= self._list_old_parts(model, grace_s)
            for digest in sorted(parts):
                self._delete_manifest(model, digest)
        return SweepResult(tuple(sorted(parts)))

    def _list_old_parts(self, model: str, grace_s: float) -> set[str]:
        """Returns the digests in the tags of parts that no publisher relied on for a time."""
        used_s: dict[str, int] = {}
        for tag in filter(None, map(_PART_TAG.fullmatch, self._list_tags(model))):
            used_s[tag["hex"]] = max(used_s.get(tag["hex"], 0), int(tag["at_s"]))
        return {PREFIX + digits for digits, at_s in used_s.items() if at_s <= time.time() - grace_s}

    def _is_part(self, model: str, digest: str) -> bool:
        with suppress(BundleError, NotPublishedError):
            return parse_part(self._read_manifest(model, digest)).digest == digest
        return False

    def _locate(self, model: str, path: str) -> tuple[str, str]:
        """Returns the URL of something in a model's repository, and what messages call the repository."""
        repository = f"{self._prefix}{model}"
        if not _MODEL.fullmatch(model) or len(repository) > _MAX_REPOSITORY_LENGTH:
            raise RegistryError(
                f"not a name for an OCI registry: {model[:200]!r}\n"
                "  expected lower-case letters and digits with single '.', '_' or '-' between them"
            )
        return f"{self._client.base}{repository}/{path}", f"{self._host}/{repository}"

    def _fetch(
        self, method: str, model: str, path: str, doing: str, **options: Any
    ) -> tuple[requests.Response, bytes]:
        """Asks as `HttpClient.ask` does, again while the registry is unavailable."""
        url, place = self._locate(model, path)
        options["follows"] = method in ("GET", "HEAD")
        return with_retries(lambda: self._client.ask(method, url, f"{doing}: {place}", **options))

    def _list_names(self, url: str, field: str) -> list[str]:
        """Returns the names that a list has in a field, from all of its pages."""
        names: list[str] = []
        size_bytes, doing = 0, f"list {field}"
        where = f"{doing}: {self._host}"
        for _ in range(_MAX_PAGES):
            page = url
            answer, body = with_retries(
                partial(self._client.ask, "GET", page, where, limit_bytes=_MAX_PAGE_BYTES, follows=True)
            )
            names += self._names_in(body, field)
            size_bytes += len(body)
            links = requests.utils.parse_header_links(answer.headers.get("Link", ""))
            following = next((link["url"] for link in links if link.get("rel") == "next"), "")
            if not following:
                return list(dict.fromkeys(names))
            url = self._client.resolve(following, where)
            if not self._client.is_own(url) or url == page:
                raise self._unexpected(doing, "its own pages", "a bad next page")
            if len(names) > _MAX_NAMES or size_bytes > MAX_LISTING_BYTES:
                break
        expected = f"at most {_MAX_NAMES} names of together {MAX_LISTING_BYTES} bytes"
        raise self._unexpected(doing, expected, "more")

    def _names_in(self, body: bytes, field: str) -> list[str]:
        try:
            names = parse_json(body, name="the answer").get(field) or []
        except BundleError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._unexpected(f"list {field}", "a list of names", "something else")
        return names

    def _unexpected(self, doing: str, expected: str, got: str) -> RegistryError:
        return RegistryError(f"cannot {doing}: {self._host}\n  expected {expected}, got {got}")
