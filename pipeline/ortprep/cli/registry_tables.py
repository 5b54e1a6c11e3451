"""Registries as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from ortprep.cli.console import build_table
from ortprep.registry.alias_moves import Move
from ortprep.registry.documents import PartVariant, Version
from ortprep.registry.garbage_collection import CollectResult
from ortprep.registry.versions import ModelState
from ortprep.report.formatting import count_of


def build_models_table(states: Iterable[ModelState]) -> Table:
    """Returns one row per model."""
    return build_table("models", ("model", "latest", "aliases", ">versions"), map(_model_row, states))


def _model_row(state: ModelState) -> tuple[str, ...]:
    latest = state.latest().label if state.versions else "–"
    aliases = (
        f"{name} → {state.versions[digest].label}"
        for name, digest in state.aliases.items()
        if digest in state.versions
    )
    return state.model, latest, ", ".join(aliases) or "–", str(len(state.versions))


def build_versions_table(state: ModelState) -> Table:
    """Returns one row per version, the latest last."""
    headings = ("label", "aliases", "parts", "published", "by", ">MB")
    rows = [_version_row(state, version) for version in state.versions.values()]
    return build_table(state.model, headings, rows)


def _version_row(state: ModelState, version: Version) -> tuple[str, ...]:
    aliases = [name for name, digest in state.aliases.items() if digest == version.digest]
    return (
        f"{version.label}{' (superseded)' if version.digest in state.superseded_by else ''}",
        ", ".join(aliases) or "–",
        "\n".join(", ".join(map(_describe, part.variants)) for part in version.parts),
        version.published_at[:16],
        version.by or "–",
        f"{sum(part.size_bytes for part in version.parts) / 2**20:.1f}",
    )


def _describe(variant: PartVariant) -> str:
    hardware = variant.hardware.rpartition(" (")[0]
    return f"{variant.name} on {hardware}" if hardware else variant.name


def build_moves_table(state: ModelState, moves: Iterable[Move]) -> Table:
    """Returns one row per move of an alias, oldest first."""
    rows = [
        (
            move.alias,
            move.at[:16],
            move.action,
            state.versions[move.version].label,
            move.by or "–",
            move.reason or "–",
            "; ".join(move.forced) or "–",
        )
        for move in moves
    ]
    headings = ("alias", "when", "what", "version", "by", "reason", "overridden")
    return build_table("aliases", headings, rows)


def describe_collected(collected: CollectResult, *, done: bool) -> Iterator[str]:
    """Yields the lines that say what a collection removes, or removed."""
    what, swept = "removed" if done else "would remove", collected.swept
    files = f"{count_of(swept.files, 'file')} of {swept.size_bytes / 2**20:.1f} MB"
    counts = f"{count_of(len(collected.versions), 'version')}, {count_of(len(swept.parts), 'part')}, {files}"
    yield f"{collected.model}: {what} {counts}; keeps {collected.kept}"
    yield from (f"  {version.label} {version.digest}" for version in collected.versions)
