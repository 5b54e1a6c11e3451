"""`promote` and `rollback`: what an alias names, behind a gate, with history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.bundle.manifest import PlanFigures, VariantRecord
from pipeline.bundle.paths import is_safe_name
from pipeline.errors import ConflictError, NotPublishedError, PromotionRefusedError, RegistryError
from pipeline.measuring.shipped import shipped_figures, worst_error
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.composition import Candidate, list_candidates
from pipeline.registry.records import FULL_DIGEST, AliasRecord
from pipeline.registry.references import Reference
from pipeline.registry.reservations import reserve
from pipeline.registry.state import Alias, State, Version, resolve
from pipeline.spec.redaction import redact_url

MAX_REGRESSION = 1.10
"""How much longer init or a steady run may take than with the version the alias names now."""

_ROUNDS = 5


@dataclass(frozen=True)
class Gate:
    """What stands between a version and an alias.

    Attributes:
        max_regression: How much longer init and a steady run may take than with what the alias names now.
        force: Whether objections are overruled, and recorded.
    """

    max_regression: float = MAX_REGRESSION
    force: bool = False


@dataclass(frozen=True)
class Moved:
    """What came of moving an alias.

    Attributes:
        alias: As it is now.
        version: The version it names.
        before: Digest of the version it named before; "" for none.
        forced: What was overruled.
    """

    alias: Alias
    version: Version
    before: str
    forced: tuple[str, ...]


def find_objections(
    candidates: Sequence[Candidate], serving: Sequence[Candidate], *, max_regression: float
) -> tuple[str, ...]:
    """Returns all that speaks against one version in the place of another. Pure.

    Figures are compared of variants for the same target and hardware or, where there are none, of the same
    name, measured as they are shipped, with the page cache warm.

    Args:
        candidates: Variants of the version that is to be named.
        serving: Variants of the version that is named now; none if none is.
        max_regression: Largest ratio of medians, new to old.
    """
    return (
        *(text for candidate in candidates for text in _failures(candidate)),
        *(text for old in serving for text in _losses(old, candidates, max_regression)),
    )


def _failures(candidate: Candidate) -> Iterator[str]:
    record = _record_of(candidate)
    if record is None:
        yield f"{candidate.name}: its manifest does not say that it was verified"
        return
    if not record.verification.errors and not record.accuracy:
        yield f"{candidate.name}: its answers were compared with nothing"
    worst = worst_error(record)
    if record.accuracy and worst is not None and not worst <= 1:
        yield f"{candidate.name}: off by {worst:.3g} of what its gate allows"
    for error in record.verification.errors:
        if not error.ratio <= 1:
            off = f"{error.output} is off by {error.ratio:.3g} of its tolerance"
            yield f"{candidate.name}: verification failed: {off}"


def _losses(old: Candidate, candidates: Sequence[Candidate], max_regression: float) -> Iterator[str]:
    same = [one for one in candidates if one.variant.target == old.variant.target]
    if not same:
        yield f"{old.name}: nothing for target {old.variant.target}, which is served now"
        return
    # On the same hardware if there is one, else what goes by the same name: better refused than not asked.
    exact = [one for one in same if _place(one) == _place(old)]
    new = next(iter(exact or [one for one in same if one.variant.name == old.variant.name]), None)
    if new is None:
        yield f"{old.name}: nothing to compare with among {', '.join(one.name for one in same)}"
        return
    before, after = _shipped_figures(old), _shipped_figures(new)
    if before is None:
        return
    if after is None:
        yield f"{old.name}: not measured, and what is served now is"
        return
    if before.ready_ms is None or after.ready_ms is None:  # a manifest before 1.4
        start = ("first result", before.first_result_ms, after.first_result_ms)
    else:
        start = ("getting ready", before.ready_ms, after.ready_ms)
    pairs = (start, ("steady run", before.steady_ms, after.steady_ms))
    for what, was, now in pairs:
        if not now.median <= was.median * max_regression:
            yield (
                f"{new.name}: {what} takes {now.median:.3g} ms instead of {was.median:.3g} ms, "
                f"{now.median / was.median:.2f}×; expected at most {max_regression:.2f}×"
            )


def _place(candidate: Candidate) -> tuple[object, ...]:
    needs = candidate.variant.requirements
    return (
        candidate.variant.target,
        candidate.variant.name,
        needs.machine,
        needs.cpu_features,
        needs.compute_capability,
    )


def _record_of(candidate: Candidate) -> VariantRecord | None:
    records = candidate.part.manifest.variants
    return next((record for record in records if record.name == candidate.variant.name), None)


def _shipped_figures(candidate: Candidate) -> PlanFigures | None:
    """Returns what the shipped plan costs with a warm page cache, None if that was not measured."""
    record = _record_of(candidate)
    return None if record is None else shipped_figures(record)


def promote(
    reference: Reference,
    alias: str,
    catalogue: Catalogue,
    *,
    gate: Gate | None = None,
    reason: str = "",
    by: str = "",
) -> Moved:
    """Makes an alias name a version.

    Args:
        reference: The version.
        alias: The alias; made if there is none.
        catalogue: The registry.
        gate: What the version has to pass.
        reason: Why, in the user's words; required to overrule the gate.
        by: Who does it; "" records nobody.

    Raises:
        NotPublishedError: There is no such version.
        PromotionRefusedError: It does not pass; every objection is named.
        ConflictError: The alias is a label, or others move it without pause.
        RegistryError: The registry failed, or the name of the alias or the reason is not good.
    """
    gate = gate or Gate()
    check_alias(alias)
    if gate.force and not reason.strip():
        raise RegistryError(
            "no reason given\n  expected one, which is recorded", hint="--force --reason 'why'"
        )
    state = catalogue.read_state(reference.name)
    version = resolve(state, reference.version, registry=redact_url(catalogue.backend.url))
    if alias in state.labels:
        raise ConflictError(f"{alias!r} is a label of {reference.name}\n  expected an alias that is none")
    return _move(catalogue, version, alias, "promote", gate, reason, by)


def check_alias(alias: str) -> None:
    """Checks that something can be the name of an alias.

    Raises:
        RegistryError: It cannot.
    """
    if not is_safe_name(alias) or len(alias) > 100 or FULL_DIGEST.fullmatch(alias):
        raise RegistryError(
            f"no name of an alias: {alias[:200]!r}\n"
            "  expected up to 100 letters, digits, '.', '_' and '-', and no digest"
        )


def rollback(name: str, alias: str, catalogue: Catalogue, *, reason: str = "", by: str = "") -> Moved:
    """Makes an alias name what it named before; the gate does not ask, since that has served already.

    Args:
        name: The model.
        alias: The alias.
        catalogue: The registry.
        reason: Why, in the user's words.
        by: Who does it; "" records nobody.

    Raises:
        NotPublishedError: There is no such alias, nothing it named before, or that was collected.
        ConflictError: Others move it without pause.
        RegistryError: The registry failed.
    """
    state = catalogue.read_state(name)
    found = state.aliases.get(alias)
    if found is None or len(found.stack) < 2:
        got = "no such alias" if found is None else "nothing that is still there"
        raise NotPublishedError(
            f"nothing to roll back to: {name}@{alias}\n  expected a version that it named before, got {got}",
            hint=f"ortprep versions {name}",
        )
    version = state.versions[found.stack[-2]]
    return _move(catalogue, version, alias, "rollback", Gate(), reason, by)


def _move(
    catalogue: Catalogue, version: Version, alias: str, action: str, gate: Gate, reason: str, by: str
) -> Moved:
    model, record = version.record.model, version.record
    with reserve(catalogue, model, source=record.source, spec=record.spec):
        for _ in range(_ROUNDS):
            state = catalogue.read_state(model)
            if version.digest not in state.versions:
                raise NotPublishedError(f"no such version any more: {model}@{version.digest}")
            now = state.aliases.get(alias)
            before = now.version if now is not None else ""
            last = max((move.record.sequence for move in now.history), default=0) if now is not None else 0
            forced = _pass_gate(catalogue, state, version, before, gate) if action == "promote" else ()
            if before == version.digest:
                assert now is not None
                return Moved(now, state.versions[version.digest], before, forced)
            move = AliasRecord(
                alias=alias,
                action=action,
                version=version.digest,
                sequence=1 + last,
                at=datetime.now(UTC).isoformat(timespec="microseconds"),
                reason=reason,
                forced=forced,
                by=by,
            )
            written = catalogue.write_record(model, move)
            state = catalogue.mirror(model)
            if version.digest not in state.versions:
                raise NotPublishedError(f"no such version any more: {model}@{version.digest}")
            if state.aliases[alias].history[-1].digest == written.digest:
                return Moved(state.aliases[alias], state.versions[version.digest], before, forced)
            if action == "rollback":
                break
    raise ConflictError(
        f"somebody else moves {model}@{alias}\n"
        f"  expected to be the last to move it, got {state.aliases[alias].version} there",
        hint=f"ortprep versions {model}   (then decide again)",
    )


def _pass_gate(
    catalogue: Catalogue, state: State, version: Version, serving: str, gate: Gate
) -> tuple[str, ...]:
    """Returns the objections that are overruled.

    Raises:
        PromotionRefusedError: There are some, and they are not overruled.
    """
    if serving == version.digest:
        return ()
    new = list_candidates(catalogue.read_parts(state, version))
    old = list_candidates(catalogue.read_parts(state, state.versions[serving])) if serving else ()
    objections = find_objections(new, old, max_regression=gate.max_regression)
    if objections and not gate.force:
        lines = "\n".join(f"  {objection}" for objection in objections)
        raise PromotionRefusedError(
            f"not promoted: {state.model}@{version.digest}\n{lines}",
            hint="ortprep promote … --force --reason 'why'   (the reason is recorded)",
        )
    return objections
