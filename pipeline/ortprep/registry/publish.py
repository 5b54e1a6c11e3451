"""`publish`: a prepared bundle becomes part of a version.

Files go first, then the part, then the version. A publisher that is killed leaves nothing visible and
incomplete, and the next one uploads only what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import open_inside
from ortprep.errors import ConflictError, SignatureError
from ortprep.registry.backend import Kind, ref_name
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import Part, Version, build_version
from ortprep.registry.part_bundle import read_part
from ortprep.registry.signatures import sign_part, verify_part
from ortprep.registry.versions import ModelState, check_alias_name, merge_parts
from ortprep.transport.transfer import Observer, Progress, ignore, map_parallel

_MAX_ROUNDS = 20


@dataclass(frozen=True)
class PublishResult:
    """The outcome of publishing.

    Attributes:
        version: The version that the part belongs to now.
        superseded_by: Digest of the version that took its place, "" if none did.
        uploaded_bytes: Size of the files that were missing.
        is_new: Whether the version was not there before.
    """

    part: str
    version: Version
    superseded_by: str
    uploaded_bytes: int
    total_bytes: int
    is_new: bool


def publish(
    bundle: Path,
    catalogue: Catalogue,
    *,
    label: str | None = None,
    private_key: Path | None = None,
    public_key: Path | None = None,
    observer: Observer = ignore,
) -> PublishResult:
    """Publishes a bundle as a version, with what others published of the same source and spec.

    Args:
        bundle: The bundle's folder.
        catalogue: Registry to publish to.
        label: Human name of the version; None for the date and some digits. Where several versions of a
            source and spec have it, it names the latest of them.
        private_key: Key to sign the part with; None leaves it unsigned.
        public_key: Key that every part of the version must be signed with; others' parts without it are left
            out.
        observer: Takes the progress.

    Raises:
        BundleError: The bundle cannot be read, or has no portable variant; or, as IntegrityError, is not as
            it was written.
        SignatureError: The key cannot be used, or the signature that is required is not there.
        ConflictError: The label is another version's, or others publish without pause.
        RegistryError: The registry failed, or the label is no name.
    """
    bundle = Path(os.path.realpath(bundle))
    part = read_part(bundle)
    before = catalogue.read_state(part.model)
    if label is not None:
        _check_label(label, before, part)
    signatures: tuple[bytes, ...] = ()
    if private_key is not None:
        signatures = (sign_part(part, private_key, catalogue.read_signatures(part)[part.digest]),)
    if public_key is not None:
        there = catalogue.read_signatures(part)[part.digest]
        found = verify_part(part, (*there, *signatures), public_key)
        signatures = tuple(dict.fromkeys((*signatures, found)))
    uploaded = _upload(part, bundle, catalogue, observer)
    for signature in signatures:  # one that was there is refreshed: a collection may be about to remove it
        catalogue.attach_signature(part, signature)
    version = _merge(part, catalogue, label, public_key)
    # A collection that began before may have removed what was there: look again, now that it is named.
    uploaded += _upload(part, bundle, catalogue, observer)
    after = catalogue.read_state(part.model)
    if after.labels.get(version.label) == version.digest:
        # Only now: a publisher that withdraws a version must not have taken the tag of another one.
        catalogue.backend.put_label(part.model, version.label, version.data)
    return PublishResult(
        part=part.digest,
        version=version,
        superseded_by=after.superseded_by.get(version.digest, ""),
        uploaded_bytes=uploaded,
        total_bytes=part.summary.size_bytes,
        is_new=version.digest not in before.versions,
    )


def _check_label(label: str, state: ModelState, part: Part) -> None:
    """Raises, before anything is written, if a label is no name, or names something else already."""
    check_alias_name(label, called="label")
    if label in state.aliases:
        raise ConflictError(f"{label!r} is an alias of {part.model}\n  expected a label that is not an alias")
    _check_holders(state, label, (part.source, part.spec))


def _check_holders(state: ModelState, label: str, family: tuple[str, str]) -> None:
    """Raises if a label is that of a version of another source or spec."""
    for holder in state.holders(label):
        if holder.family != family:
            raise ConflictError(
                f"label taken: {state.model}@{label}\n"
                f"  expected it to be free, or to name this source and spec, got {holder.digest}",
                hint="ortprep publish … --label ANOTHER   (a label always names the same source and spec)",
            )


def find_missing(part: Part, catalogue: Catalogue) -> tuple[FileEntry, ...]:
    """Returns the files of a part that have to be uploaded, each digest once; the others are refreshed."""
    entries = {entry.sha256: entry for entry in part.files}
    there = map_parallel(lambda digest: catalogue.backend.has_file(part, entries[digest]), entries)
    return tuple(entry for digest, entry in entries.items() if not there[digest])


def _upload(part: Part, bundle: Path, catalogue: Catalogue, observer: Observer) -> int:
    """Uploads what is missing and writes the part; returns the number of bytes sent."""
    backend = catalogue.backend
    missing = find_missing(part, catalogue)
    progress = Progress("upload", sum(entry.size_bytes for entry in missing), observer)

    def upload(entry: FileEntry) -> None:
        # Opened once: a link of another user's may take the place of what was checked.
        with open_inside(bundle, entry.path) as file:
            backend.put_file(part, entry, Path(f"/proc/self/fd/{file.fileno()}"))
        progress.add(entry.size_bytes)

    # The largest first, so that none is left over when the others are done.
    map_parallel(upload, sorted(missing, key=lambda entry: -entry.size_bytes))
    backend.put_ref(part.model, Kind.PART, ref_name(part.digest), part.data)
    return progress.total_bytes


def _merge(part: Part, catalogue: Catalogue, label: str | None, public_key: Path | None) -> Version:
    """Adds the version that has all parts of this source and spec, unless it is there; returns it.

    Who adds a version and then looks sees every version that was added before, so of several publishers at
    least the last one to look adds the version that has all their parts. At least that one also sees that
    others use its label for something else, and withdraws.
    """
    added: Version | None = None
    for _ in range(_MAX_ROUNDS):
        state = catalogue.read_state(part.model)
        if added is not None:
            try:
                _check_holders(state, added.label, added.family)
            except ConflictError:
                catalogue.backend.delete_version(part.model, ref_name(added.digest, added.label))
                raise
        family = [one for one in state.versions.values() if one.family == (part.source, part.spec)]
        parts = _choose_parts(part, family, catalogue, public_key)
        digests = frozenset(one.digest for one in parts)
        same = [version for version in family if version.part_digests == digests]
        if added in same and label is not None:
            return added
        # One whose label is contested may be withdrawn at any moment.
        settled = [version for version in same if len(state.holders(version.label)) == 1]
        if settled:
            # Two that come to the same at once may each add one: the first counts, and both say so.
            return settled[0]
        if label is not None:  # an upload takes long, and others may have taken the label meanwhile
            _check_label(label, state, part)
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        added = build_version(part.model, parts, label=label, published_at=now)
        name = ref_name(added.digest, added.label)
        catalogue.backend.put_ref(part.model, Kind.VERSION, name, added.data)
    raise ConflictError(
        f"others keep publishing {part.model}\n"
        f"  expected to be the last to write once in {_MAX_ROUNDS} times",
        hint="publish again: what was uploaded is kept",
    )


def _choose_parts(
    part: Part, family: Sequence[Version], catalogue: Catalogue, public_key: Path | None
) -> tuple[Part, ...]:
    """Returns the parts of the latest version or, if a newer bundle took this one's place, of one with it."""
    by_digest = {part.digest: part}
    others = [version for version in family if version.part_digests != {part.digest}]
    with suppress(SignatureError):  # not one part may be taken over; each was logged
        # A collection may have removed one just now, with its version.
        found = catalogue.read_parts(*others, public_key=public_key, skips_lost=True)
        by_digest |= {one.digest: one for one in found}
    summaries = [one.summary for one in by_digest.values()]
    merged = merge_parts(summaries)
    if part.digest not in {one.digest for one in merged}:
        merged = merge_parts(summaries, first=part.digest)
    return tuple(by_digest[one.digest] for one in merged)
