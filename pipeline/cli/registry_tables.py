"""Registries as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from pipeline.registry.collection import Collected
from pipeline.registry.records import PartVariant
from pipeline.registry.state import State, Version, latest_version

_DIGEST_DIGITS = 12


def build_models_table(states: Iterable[State]) -> Table:
    """Returns one row per model."""
    table = Table(title="models")
    for heading in ("model", "latest", "aliases"):
        table.add_column(heading)
    table.add_column("versions", justify="right")
    for state in states:
        latest = _name(latest_version(state)) if state.versions else "–"
        aliases = (
            f"{name} → {_name(state.versions[a.version])}" for name, a in state.aliases.items() if a.version
        )
        table.add_row(state.model, latest, ", ".join(aliases) or "–", str(len(state.versions)))
    return table


def build_versions_table(state: State) -> Table:
    """Returns one row per version, the latest last."""
    table = Table(title=state.model)
    for heading in ("version", "label", "aliases", "variants", "published", "signed", "by"):
        table.add_column(heading)
    table.add_column("MB", justify="right")
    for version in state.versions.values():
        parts = [state.parts[digest] for digest in version.record.parts]
        signed = sum(bool(state.signatures.get(digest)) for digest in version.record.parts)
        aliases = [name for name, alias in state.aliases.items() if alias.version == version.digest]
        table.add_row(
            _short(version.digest),
            ", ".join((*version.labels, *(("(superseded)",) if version.superseded_by else ()))),
            ", ".join(aliases) or "–",
            ", ".join(_describe(variant) for part in parts for variant in part.variants),
            version.published_at[:16],
            f"{signed} of {len(parts)} parts" if signed else "no",
            version.by or "–",
            f"{sum(part.size_bytes for part in parts) / 2**20:.1f}",
        )
    return table


def _describe(variant: PartVariant) -> str:
    hardware = variant.hardware.rpartition(" (")[0]
    return f"{variant.name} on {hardware}" if hardware else variant.name


def build_moves_table(state: State) -> Table:
    """Returns one row per move of an alias, oldest first."""
    table = Table(title="aliases")
    for heading in ("alias", "when", "what", "version", "by", "reason", "overruled"):
        table.add_column(heading)
    for alias in state.aliases.values():
        for move in alias.history:
            record = move.record
            version = state.versions.get(record.version)
            table.add_row(
                alias.name,
                record.at[:16],
                record.action,
                _name(version) if version else _short(record.version),
                record.by or "–",
                record.reason or "–",
                "; ".join(record.forced) or "–",
            )
    return table


def describe_collected(collected: Collected, *, done: bool) -> Iterator[str]:
    """Yields the lines that say what a collection removes, or removed."""
    what = "removed" if done else "would remove"
    files = f"{len(collected.files)} files of {collected.size_bytes / 2**20:.1f} MB"
    versions = f"{len(collected.versions)} versions ({', '.join(collected.labels) or '–'})"
    yield (
        f"{collected.model}: {what} {versions}, {len(collected.parts)} parts, {files}; keeps {collected.kept}"
    )


def _name(version: Version) -> str:
    return version.labels[-1] if version.labels else _short(version.digest)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:_DIGEST_DIGITS]
