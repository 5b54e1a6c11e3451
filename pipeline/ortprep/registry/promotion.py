"""`promote` and `rollback`: what an alias names, behind a gate, and what it named before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.manifest import Manifest
from ortprep.errors import ConflictError, NotPublishedError, RegistryError, SignatureError
from ortprep.measuring.change import VERIFICATION, RegressionLimits
from ortprep.measuring.regression import compare
from ortprep.measuring.shipped import worst_error
from ortprep.quoting import quoted
from ortprep.registry.backend import Kind
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import Part, Version
from ortprep.registry.references import VersionRef
from ortprep.registry.versions import ModelState, check_alias_name, resolve
from ortprep.spec.urls import redact_url

MAX_REGRESSION = 1.10
"""How many times worse a figure may be than that of the version the alias names now, beyond the noise."""


@dataclass(frozen=True)
class PromotionGate:
    """Conditions for an alias to name a version.

    Attributes:
        max_regression: Factor by which a figure may be worse than that of the version the alias names now.
        force: Whether objections are overruled.
        public_key: Key that every part of the version must be signed with, even if forced; None for none.
            Parts without it are not compared with either.
    """

    max_regression: float = MAX_REGRESSION
    force: bool = False
    public_key: Path | None = None


@dataclass(frozen=True)
class PromoteResult:
    """The outcome of moving an alias: the digest of the version it named before, and what was overruled."""

    alias: str
    version: Version
    before: str
    forced: tuple[str, ...] = ()


def promote(
    reference: VersionRef, alias: str, catalogue: Catalogue, *, gate: PromotionGate | None = None
) -> PromoteResult:
    """Makes a new or existing alias name a version.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: A part of it is not signed as the gate demands.
        ConflictError: The alias is a label, or somebody else moves it.
        RegistryError: It does not pass (every objection is named), the registry failed, or the alias has an
            invalid name.
    """
    gate = gate or PromotionGate()
    check_alias_name(alias)
    state = catalogue.read_state(reference.name)
    version = resolve(state, reference.version, registry=redact_url(catalogue.backend.url))
    before = state.aliases.get(alias, "")
    forced = _pass_gate(catalogue, version, before or version.digest, state, gate)
    return replace(_move(alias, version, before, catalogue), forced=forced)


def rollback(name: str, alias: str, catalogue: Catalogue) -> PromoteResult:
    """Makes an alias of a model name what it named before, once.

    The gate does not ask, since that served already. The other arguments are those of `promote`.

    Raises:
        NotPublishedError: There is no such alias, nothing it named before, or that was collected.
        ConflictError: Somebody else moves it.
        RegistryError: The registry failed.
    """
    state = catalogue.read_state(name)
    current = state.aliases.get(alias, "")
    version = state.versions.get(catalogue.list_refs(name, Kind.PREVIOUS).get(alias, ""))
    if not current or version is None or version.digest == current:
        got = "none that still exists" if current else "no such alias"
        raise NotPublishedError(
            f"nothing to roll back to: {name}@{alias}\n"
            f"  expected a version that it pointed to before, got {got}",
            hint=f"ortprep versions {quoted(name)}   (then promote one of them)",
        )
    return _move(alias, version, current, catalogue, goes_back=True)


def _pass_gate(
    catalogue: Catalogue, version: Version, now: str, state: ModelState, gate: PromotionGate
) -> tuple[str, ...]:
    """Returns the overruled objections; raises SignatureError, or RegistryError for others.

    `now` is the digest of the version that the alias names, that of `version` itself if it names none.
    """
    parts = catalogue.read_parts(version, public_key=gate.public_key)
    if len(parts) < len(version.parts):
        missing = version.part_digests - {part.digest for part in parts}
        raise SignatureError(
            f"not promoted: {version.model}@{version.digest}\n"
            f"  expected a valid signature of each part, got none of {', '.join(sorted(missing))}",
            hint="ortprep publish BUNDLE --sign KEY --verify KEY   (publishes only signed parts)",
        )
    hint = "ortprep promote … --force"
    new = catalogue.read_manifests(parts)
    objections = tuple(text for part, manifest in new for text in _find_unverified(part, manifest))
    serving = state.versions.get(now)
    if serving is None:
        objections += (f"nothing to compare with: cannot read {now}, which serves now",)
    elif serving != version:
        try:
            old = catalogue.read_manifests(catalogue.read_parts(serving, public_key=gate.public_key))
            objections += _find_regressions(old, new, gate)
        except SignatureError as error:
            objections += (f"nothing to compare with in {serving.label}: {error.message.splitlines()[0]}",)
            hint = f"ortprep versions {quoted(version.model)}   (roll back, or --force)"
    if objections and not gate.force:
        lines = "\n".join(f"  {objection}" for objection in objections)
        raise RegistryError(f"not promoted: {version.model}@{version.digest}\n{lines}", hint=hint)
    return objections


def _find_unverified(part: Part, manifest: Manifest) -> Iterator[str]:
    """Yields the variants that were not verified, or not within their tolerance."""
    records = {record.name: record for record in manifest.variants}
    for variant in part.summary.variants:
        worst = worst_error(records[variant.name]) if variant.name in records else None
        if worst is None:
            yield f"{variant.name}: its answers were not compared with the source's"
        elif not worst <= 1:
            yield f"{variant.name}: verification failed: off by {worst:.3g} times its tolerance"


def _find_regressions(
    old: Sequence[tuple[Part, Manifest]], new: Sequence[tuple[Part, Manifest]], gate: PromotionGate
) -> tuple[str, ...]:
    """Returns what `ortprep compare` refuses of one version in the place of another, and nothing else."""
    limits = RegressionLimits(gate.max_regression - 1)
    manifests = [[manifest for _, manifest in pairs] for pairs in (old, new)]
    comparison = compare(*manifests, limits=limits)
    return tuple(
        f"{variant.old or variant.new}: {failure}"
        for variant in comparison.variants
        for failure in variant.failures
        if not failure.startswith(VERIFICATION)
    )


def _move(
    alias: str, version: Version, before: str, catalogue: Catalogue, *, goes_back: bool = False
) -> PromoteResult:
    """Moves an alias; unless it goes back, what it names until then becomes its previous version.

    A promotion that is killed in between leaves nothing to roll back to.

    `before` is the digest that the decision to move it was made with, "" for no alias.
    """
    model, backend = version.model, catalogue.backend
    state = catalogue.read_state(model)
    if state.holders(alias):
        raise ConflictError(f"{alias!r} is a label of {model}\n  expected an alias that is not a label")
    if state.aliases.get(alias, "") != before:
        raise _moved_meanwhile(state, alias, f"{before or 'none'}, which this was compared with")
    result = PromoteResult(alias, version, before)
    if before == version.digest:
        return result
    if not goes_back:
        backend.put_ref(model, Kind.PREVIOUS, alias, state.versions.get(before, version).data)
    backend.put_ref(model, Kind.ALIAS, alias, version.data)
    after = catalogue.read_state(model)
    if version.digest not in after.versions:
        if before in after.versions:
            backend.put_ref(model, Kind.ALIAS, alias, after.versions[before].data)
        raise NotPublishedError(f"version does not exist any more: {model}@{version.digest}")
    if after.aliases.get(alias) != version.digest:
        raise _moved_meanwhile(after, alias, "to be the last to move it")
    return result


def _moved_meanwhile(state: ModelState, alias: str, expected: str) -> ConflictError:
    return ConflictError(
        f"another process moves {state.model}@{alias}\n"
        f"  expected {expected}, got {state.aliases.get(alias, 'none')} there",
        hint=f"ortprep versions {quoted(state.model)}   (then decide again)",
    )
