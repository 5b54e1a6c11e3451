"""`gc`: removes versions without an alias, then parts and files without a version."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ortprep.registry.backend import Kind, SweepResult
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import Version
from ortprep.registry.versions import ModelState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionPolicy:
    """Versions to keep, besides those that an alias names or that `rollback` would go to.

    Attributes:
        keep_latest: Number of versions published last.
        keep_days: Age in days up to which a version is kept.
        grace_hours: Age in hours up to which parts and files without a version are kept: somebody may be
            publishing them. No publisher may take longer, and no clocks may differ by more.
    """

    keep_latest: int = 3
    keep_days: float = 30.0
    grace_hours: float = 24.0


@dataclass(frozen=True)
class CollectResult:
    """Removed versions, oldest first, parts and files, also of a dry run; and the number of versions kept."""

    model: str
    versions: tuple[Version, ...]
    swept: SweepResult
    kept: int


def choose_kept(
    state: ModelState, previous: Mapping[str, str], policy: RetentionPolicy, *, now: datetime
) -> frozenset[str]:
    """Returns the digests of the versions that stay; `previous` has what each alias named before. Pure."""
    named = {*state.aliases.values(), *(previous[alias] for alias in previous if alias in state.aliases)}
    ranked = sorted(
        state.versions.values(),
        key=lambda version: (version.digest not in state.superseded_by, version.published_at),
    )
    latest = {version.digest for version in ranked[max(0, len(ranked) - policy.keep_latest) :]}
    oldest = now - timedelta(days=policy.keep_days)
    young = {version.digest for version in ranked if _time_of(version) > oldest}
    return frozenset(state.versions.keys() & (named | latest | young))


def _time_of(version: Version) -> datetime:
    try:
        at = datetime.fromisoformat(version.published_at)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def collect(
    model: str, catalogue: Catalogue, *, policy: RetentionPolicy | None = None, dry_run: bool = True
) -> CollectResult:
    """Removes what neither an alias nor the policy keeps; only says what that would be if `dry_run`.

    Versions go first, then parts, then files. A collection that is killed leaves every visible version whole,
    and the next one removes the rest. Parts and files stay if a version cannot be read.

    Raises:
        RegistryError: The registry failed, or deletion is switched off there.
    """
    policy = policy or RetentionPolicy()
    state = catalogue.read_state(model)
    previous = catalogue.list_refs(model, Kind.PREVIOUS)
    kept = choose_kept(state, previous, policy, now=datetime.now(UTC))
    unused = [version for digest, version in state.versions.items() if digest not in kept]
    # Before anything is deleted: what cannot be read would end this at the same place each time.
    catalogue.read_parts(*(version for digest, version in state.versions.items() if digest in kept))
    names = {} if dry_run or not unused else catalogue.list_refs(model, Kind.VERSION)
    removed = tuple(version for version in unused if dry_run or _delete_unnamed(version, names, catalogue))
    listed = set(catalogue.list_refs(model, Kind.VERSION).values())
    # Read again before anything is swept: publishers go on meanwhile, and refresh what they rely on.
    there = catalogue.read_state(model).versions
    remaining = [version for digest, version in there.items() if not dry_run or digest in kept]
    if unread := listed - there.keys():
        # It may be of a newer ortprep, or damaged on the way: which files are its own is not known.
        log.warning(
            "%s: no file is removed, since a version cannot be read: %s", model, ", ".join(sorted(unread)[:5])
        )
        return CollectResult(model, removed, SweepResult(), len(remaining))
    live = catalogue.read_parts(*remaining)
    swept = catalogue.backend.sweep(model, live, grace_s=policy.grace_hours * 3600, dry_run=dry_run)
    return CollectResult(model, removed, swept, len(remaining))


def _delete_unnamed(version: Version, names: Mapping[str, str], catalogue: Catalogue) -> bool:
    """Deletes all refs to a version unless an alias names it by now; says whether it did."""
    aliases = catalogue.list_refs(version.model, Kind.ALIAS)
    if any(named == version.digest and alias != version.label for alias, named in aliases.items()):
        return False
    for name, digest in names.items():
        if digest == version.digest:
            catalogue.backend.delete_version(version.model, name)
    return True
