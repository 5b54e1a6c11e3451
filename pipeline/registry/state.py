"""What a set of records means: versions, labels, aliases with their history. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.bundle.digest import PREFIX, is_digest
from pipeline.errors import NotPublishedError
from pipeline.registry.records import (
    FULL_DIGEST,
    AliasRecord,
    LabelRecord,
    PartRecord,
    Record,
    RecordName,
    SignatureRecord,
    VersionRecord,
)

_SHORT_DIGEST = re.compile(r"(sha256:)?[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Version:
    """A version as the registry has it now.

    Attributes:
        digest: Its name.
        record: What it is made of.
        labels: Its labels, the first published first.
        published_at: When it got its first label, ISO 8601, UTC; "" for one without.
        created_at: When its newest part was prepared, likewise.
        superseded_by: Digest of a later version of the same source and spec that took its place; "" if none.
        by: Who published it, if recorded.
        host: On which machine, if recorded.
    """

    digest: str
    record: VersionRecord
    labels: tuple[str, ...]
    published_at: str
    created_at: str
    superseded_by: str = ""
    by: str = ""
    host: str = ""


@dataclass(frozen=True)
class Move:
    """One move of an alias, with the digest of its record."""

    digest: str
    record: AliasRecord


@dataclass(frozen=True)
class Alias:
    """An alias.

    Attributes:
        name: Of the alias.
        stack: Digests of the versions it named that are still there, the present one last; `rollback` takes
            one off.
        history: Every move, oldest first.
    """

    name: str
    stack: tuple[str, ...]
    history: tuple[Move, ...]

    @property
    def version(self) -> str:
        """Digest of the version it names, "" if none is left."""
        return self.stack[-1] if self.stack else ""


@dataclass(frozen=True)
class State:
    """What a model's records mean.

    Attributes:
        model: The model.
        parts: Every published part by digest, in a version or not.
        versions: Every version whose parts are all there, by digest, oldest first.
        labels: Digest of the version by label.
        aliases: By name; those too whose versions are all gone.
        signatures: By digest of the part they are for: signatures by their records' digests.
    """

    model: str
    parts: Mapping[str, PartRecord]
    versions: Mapping[str, Version]
    labels: Mapping[str, str]
    aliases: Mapping[str, Alias]
    signatures: Mapping[str, Mapping[str, SignatureRecord]]


def fold(model: str, records: Mapping[RecordName, Record]) -> State:
    """Returns what records mean, whatever their order.

    A record is what its name says; it is never written again to find out, since a later version of ortprep
    may have written more into it than this one reads.
    """
    by_digest = {name.digest: record for name, record in records.items()}
    parts = {
        digest: record
        for digest, record in sorted(by_digest.items())
        if isinstance(record, PartRecord) and record.model == model
    }
    found = {
        digest: record
        for digest, record in by_digest.items()
        if isinstance(record, VersionRecord) and _is_whole(record, model, parts)
    }
    labels = _fold_labels(record for record in by_digest.values() if isinstance(record, LabelRecord))
    labels = {name: record for name, record in labels.items() if record.version in found}
    versions = [_build_version(digest, record, parts, labels, found) for digest, record in found.items()]
    versions.sort(key=lambda version: (version.published_at or version.created_at, version.digest))
    return State(
        model=model,
        parts=parts,
        versions={version.digest: version for version in versions},
        labels={name: record.version for name, record in sorted(labels.items())},
        aliases=_fold_aliases(by_digest, found),
        signatures=_fold_signatures(by_digest, parts),
    )


def _is_whole(record: VersionRecord, model: str, parts: Mapping[str, PartRecord]) -> bool:
    """Says whether a version is what its record says; one whose parts are not all there is not visible."""
    found = [parts.get(part) for part in record.parts]
    return (
        record.model == model
        and bool(found)
        and all(
            part is not None and part.source == record.source and part.spec == record.spec for part in found
        )
    )


def _fold_labels(records: Iterable[LabelRecord]) -> dict[str, LabelRecord]:
    # Two are possible only for one version that was given the same label twice.
    labels: dict[str, LabelRecord] = {}
    for record in sorted(records, key=lambda record: (record.at, record.version)):
        labels.setdefault(record.label, record)
    return labels


def _build_version(
    digest: str,
    record: VersionRecord,
    parts: Mapping[str, PartRecord],
    labels: Mapping[str, LabelRecord],
    versions: Mapping[str, VersionRecord],
) -> Version:
    own = sorted((label for label in labels.values() if label.version == digest), key=lambda one: one.at)
    first = own[0] if own else None
    merged = merge_parts(record.source, record.spec, parts)
    latest = next((other for other, its in versions.items() if its.parts == merged), "")
    takes_over = bool(latest) and latest != digest and versions[latest].source == record.source
    return Version(
        digest=digest,
        record=record,
        labels=tuple(label.label for label in own),
        published_at=first.at if first else "",
        created_at=max(parts[part].created_at for part in record.parts),
        superseded_by=latest if takes_over and versions[latest].spec == record.spec else "",
        by=first.by if first else "",
        host=first.host if first else "",
    )


def merge_parts(
    source: str, spec: str, parts: Mapping[str, PartRecord], *, first: str = ""
) -> tuple[str, ...]:
    """Returns the parts that make up the latest version of a source and spec, sorted.

    A part is left out when newer ones have all of its variants: the same target on the same hardware with
    the same ONNX Runtime, prepared again. A function of the set, so every publisher comes to the same.

    Args:
        source: Digest of the source model.
        spec: Digest of the resolved spec.
        parts: All parts there are, by digest.
        first: Digest of a part that counts as prepared last, for the version that somebody publishes who
            publishes an older bundle.
    """
    family = [
        (digest == first, part.created_at, digest)
        for digest, part in parts.items()
        if part.source == source and part.spec == spec
    ]
    seen: set[object] = set()
    chosen = []
    for _, _, digest in sorted(family, reverse=True):
        variants = set(parts[digest].variants)
        if not variants <= seen:
            chosen.append(digest)
        seen |= variants
    return tuple(sorted(chosen))


def _fold_aliases(records: Mapping[str, Record], versions: Mapping[str, object]) -> dict[str, Alias]:
    moves: dict[str, list[Move]] = {}
    for digest, record in records.items():
        if isinstance(record, AliasRecord):
            moves.setdefault(record.alias, []).append(Move(digest, record))
    aliases = {}
    for name, history in sorted(moves.items()):
        history.sort(key=lambda move: (move.record.sequence, move.digest))
        stack: list[str] = []
        for move in history:
            if move.record.action == "rollback" and stack:
                stack.pop()
            if move.record.version in versions and stack[-1:] != [move.record.version]:
                stack.append(move.record.version)
        aliases[name] = Alias(name, tuple(stack), tuple(history))
    return aliases


def _fold_signatures(
    records: Mapping[str, Record], parts: Mapping[str, PartRecord]
) -> dict[str, dict[str, SignatureRecord]]:
    found: dict[str, dict[str, SignatureRecord]] = {}
    for digest, record in sorted(records.items()):
        if isinstance(record, SignatureRecord) and record.part in parts:
            found.setdefault(record.part, {})[digest] = record
    return found


def resolve(state: State, wanted: str | None, *, registry: str) -> Version:
    """Returns the version that a user names.

    Args:
        state: What there is.
        wanted: An alias, a label, a digest or its first eight digits or more; None for the latest version. A
            whole digest names nothing but the version of that digest.
        registry: For the message.

    Raises:
        NotPublishedError: There is none of that name, or a short digest fits several.
    """
    if not state.versions:
        raise NotPublishedError(
            f"no such model: {state.model} in {registry}\n  expected a published version, got none",
            hint=f"ortprep list --registry {registry}",
        )
    if wanted is None:
        return latest_version(state)
    if not FULL_DIGEST.fullmatch(wanted):
        named = state.aliases[wanted].version if wanted in state.aliases else state.labels.get(wanted)
        if named:
            return state.versions[named]
    fitting = [
        version
        for digest, version in state.versions.items()
        if _SHORT_DIGEST.fullmatch(wanted) and digest.startswith(PREFIX + wanted.removeprefix(PREFIX))
    ]
    if len(fitting) == 1:
        return fitting[0]
    got = "none" if not fitting else f"{len(fitting)} digests that begin so"
    raise NotPublishedError(
        f"no such version: {state.model}@{wanted} in {registry}\n"
        f"  expected an alias, a label, or a digest's first 8 digits or more, got {got}",
        hint=f"ortprep versions {state.model} --registry {registry}",
    )


def latest_version(state: State) -> Version:
    """Returns the version published last that nothing superseded; `state` has at least one."""
    versions = list(state.versions.values())
    current = [version for version in versions if not version.superseded_by] or versions
    return max(current, key=lambda version: (version.published_at, version.created_at, version.digest))


def is_full_digest(wanted: str | None) -> bool:
    """Says whether a user named a version by its whole digest, so that no registry has to be asked for it."""
    return wanted is not None and is_digest(wanted)
