"""Registries as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ortprep.registry.documents import PartVariant, Version
from ortprep.registry.garbage_collection import CollectResult
from ortprep.registry.versions import ModelState, Move
from ortprep.tables import Table, count_of, fill_table


def build_models_table(states: Iterable[ModelState]) -> Table:
    """Returns one row per model."""

    def aliases(state: ModelState) -> str:
        known = ((name, state.versions.get(digest)) for name, digest in state.aliases.items())
        return ", ".join(f"{name} → {version.label}" for name, version in known if version is not None)

    return fill_table(
        "models",
        states,
        (
            ("model", lambda state: state.model),
            ("latest", lambda state: state.latest().label if state.versions else None),
            ("aliases", aliases),
            ("versions", lambda state: len(state.versions)),
        ),
    )


def build_versions_table(state: ModelState) -> Table:
    """Returns one row per version, the latest last."""

    def variant(one: PartVariant) -> str:
        hardware = one.hardware.rpartition(" (")[0]
        return f"{one.name} on {hardware}" if hardware else one.name

    def aliases(version: Version) -> str:
        return ", ".join(name for name, digest in state.aliases.items() if digest == version.digest)

    return fill_table(
        state.model,
        state.versions.values(),
        (
            ("label", lambda one: f"{one.label}{' (superseded)' * (one.digest in state.superseded_by)}"),
            ("aliases", aliases),
            ("parts", lambda one: "; ".join(", ".join(map(variant, part.variants)) for part in one.parts)),
            ("published", lambda one: one.published_at[:16]),
            ("by", lambda one: one.by),
            ("MB", lambda one: sum(part.size_bytes for part in one.parts) / 2**20),
        ),
    )


def build_moves_table(state: ModelState, moves: Iterable[Move]) -> Table:
    """Returns one row per move of an alias, oldest first."""
    return fill_table(
        "aliases",
        moves,
        (
            ("alias", lambda move: move.alias),
            ("when", lambda move: move.at[:16]),
            ("what", lambda move: move.action),
            ("version", lambda move: state.versions[move.version].label),
            ("by", lambda move: move.by),
            ("reason", lambda move: move.reason),
            ("overridden", lambda move: "; ".join(move.forced)),
        ),
    )


def describe_collected(collected: CollectResult, *, done: bool) -> Iterator[str]:
    """Yields the lines that say what a collection removes, or removed."""
    what, swept = "removed" if done else "would remove", collected.swept
    files = f"{count_of(swept.files, 'file')} of {swept.size_bytes / 2**20:.1f} MB"
    counts = f"{count_of(len(collected.versions), 'version')}, {count_of(len(swept.parts), 'part')}, {files}"
    yield f"{collected.model}: {what} {counts}; keeps {collected.kept}"
    yield from (f"  {version.label} {version.digest}" for version in collected.versions)
