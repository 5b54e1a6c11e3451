"""`gc`: removes versions that nobody names any more, and what only they had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from pipeline.registry.backend import StoredFile
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.records import (
    CollectionRecord,
    LabelRecord,
    PartRecord,
    Record,
    RecordName,
    ReservationRecord,
    SignatureRecord,
    VersionRecord,
)
from pipeline.registry.reservations import RESERVATION_S, collecting
from pipeline.registry.state import State, Version, fold


@dataclass(frozen=True)
class Policy:
    """What is kept, beside every version that an alias names, and the one that `rollback` would go to.

    Attributes:
        keep_latest: How many of the versions published last.
        keep_days: Versions younger than so many days.
    """

    keep_latest: int = 3
    keep_days: float = 30.0


@dataclass(frozen=True)
class Collected:
    """What is, or would be, removed.

    Attributes:
        model: The model.
        versions: Their digests, oldest first.
        labels: Labels they have.
        parts: Digests of parts that no other version has.
        files: Files that no other part has; empty where the registry finds them by itself.
        kept: How many versions stay.
    """

    model: str
    versions: tuple[str, ...]
    labels: tuple[str, ...]
    parts: tuple[str, ...]
    files: tuple[StoredFile, ...]
    kept: int

    @property
    def size_bytes(self) -> int:
        """Size of the files."""
        return sum(file.size_bytes for file in self.files)


def plan_collection(
    state: State,
    records: Iterable[Record],
    files: Iterable[StoredFile],
    policy: Policy,
    *,
    now: datetime,
) -> Collected:
    """Returns what can go. Pure.

    Args:
        state: What the records mean.
        records: All records.
        files: All files that can be removed one by one.
        policy: What to keep.
        now: The time.
    """
    reserved = [
        record
        for record in records
        if isinstance(record, ReservationRecord) and record.expires_at > now.timestamp()
    ]
    families = {(record.source, record.spec) for record in reserved}
    kept = _kept_versions(state, policy, now, families)
    live_parts = {part for digest in kept for part in state.versions[digest].record.parts}
    live_parts |= {digest for digest, part in state.parts.items() if (part.source, part.spec) in families}
    gone = tuple(digest for digest in state.versions if digest not in kept)
    gone_parts = tuple(digest for digest in state.parts if digest not in live_parts)
    live_files = {entry.sha256 for digest in live_parts for entry in state.parts[digest].files}
    live_files |= {digest for record in reserved for digest in record.files}
    return Collected(
        model=state.model,
        versions=gone,
        labels=tuple(label for digest in gone for label in state.versions[digest].labels),
        parts=gone_parts,
        files=tuple(file for file in files if file.digest not in live_files),
        kept=len(kept),
    )


def _kept_versions(
    state: State, policy: Policy, now: datetime, families: set[tuple[str, str]]
) -> frozenset[str]:
    named = {digest for alias in state.aliases.values() for digest in alias.stack[-2:]}
    ranked = sorted(
        state.versions.values(), key=lambda one: (not one.superseded_by, one.published_at, one.created_at)
    )
    latest = [version.digest for version in ranked][-policy.keep_latest :] if policy.keep_latest > 0 else []
    oldest = now - timedelta(days=policy.keep_days)
    young = {digest for digest, version in state.versions.items() if _time_of(version) > oldest}
    in_use = {
        digest
        for digest, version in state.versions.items()
        if (version.record.source, version.record.spec) in families
    }
    return frozenset(state.versions.keys() & (named | set(latest) | young | in_use))


def _time_of(version: Version) -> datetime:
    try:
        at = datetime.fromisoformat(version.published_at or version.created_at)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def collect(
    model: str, catalogue: Catalogue, *, policy: Policy | None = None, dry_run: bool = True
) -> Collected:
    """Removes what no alias and no policy keeps, or says what that would be.

    Versions go first, then their parts, then files: killed anywhere, what is visible is whole, and the next
    collection finds the rest.

    Args:
        model: The model.
        catalogue: The registry.
        policy: What to keep.
        dry_run: Whether to remove nothing.

    Raises:
        ConflictError: It took too long to be safe beside publishers; what was removed is removed.
        RegistryError: The registry failed.
    """
    policy = policy or Policy()
    if dry_run:
        return _plan(model, catalogue, policy)[0]
    with collecting(catalogue, model) as check_time:
        # Planned after others can see us, so that whoever did not wait for us is seen here.
        collected, records = _plan(model, catalogue, policy)
        _remove(collected, records, catalogue, check_time)
    catalogue.mirror(model)
    return collected


def _plan(model: str, catalogue: Catalogue, policy: Policy) -> tuple[Collected, dict[RecordName, Record]]:
    files = catalogue.backend.list_files(model)
    records = catalogue.read_records(model)
    state = fold(model, records)
    return plan_collection(state, records.values(), files, policy, now=datetime.now(UTC)), records


def _remove(
    collected: Collected,
    records: Mapping[RecordName, Record],
    catalogue: Catalogue,
    check_time: Callable[[], None],
) -> None:
    model, backend = collected.model, catalogue.backend
    versions = fold(model, records).versions
    removals: list[Callable[[], None]] = [
        *(partial(catalogue.delete_record, model, name) for name in _records_to_remove(collected, records)),
        *(partial(backend.delete_version, model, versions[digest]) for digest in collected.versions),
        *(partial(backend.delete_part, model, part) for part in collected.parts),
        *(partial(backend.delete_files, model, (file.digest,)) for file in collected.files),
        partial(backend.delete_files, model, ()),
    ]
    for remove in removals:
        check_time()
        remove()


def _records_to_remove(collected: Collected, records: Mapping[RecordName, Record]) -> list[RecordName]:
    """Returns the records that go, those first without which others mean nothing."""
    versions, parts = frozenset(collected.versions), frozenset(collected.parts)
    order: tuple[tuple[type[Record], frozenset[str], str], ...] = (
        (VersionRecord, versions, ""),
        (LabelRecord, versions, "version"),
        (SignatureRecord, parts, "part"),
        (PartRecord, parts, ""),
    )
    found = [
        name
        for kind, gone, field in order
        for name, record in records.items()
        if isinstance(record, kind) and (getattr(record, field) if field else name.digest) in gone
    ]
    return found + [name for name, record in records.items() if _is_over(record)]


def _is_over(record: Record) -> bool:
    if isinstance(record, ReservationRecord):
        return record.expires_at < time.time()
    return isinstance(record, CollectionRecord) and time.time() - record.begun_at > RESERVATION_S
