"""The gate between two versions of a bundle: may the new one take the old one's place? Pure.

Variants are compared as they are shipped: what became worse, beyond a limit and the noise, and what else
differs in how they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortprep.bundle.figures import Samples
from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.change import MEASURED, VERIFICATION, Change, RegressionLimits, compare_figure
from ortprep.measuring.shipped import find_measurement, find_plan, shipped_plan, worst_error
from ortprep.measuring.snapshots import (
    Difference,
    VariantSnapshot,
    compare_manifests,
    compare_snapshots,
    list_differences,
    list_snapshots,
    pair_snapshots,
    read_hardware_facts,
)

Outcome: TypeAlias = Literal["ok", "incomparable", "regression"]
"""Nothing became worse; nothing that could be compared did; something did."""

_OUTCOMES: tuple[Outcome, ...] = ("ok", "incomparable", "regression")
_CACHES = ("warm", "cold")
_DEFAULT = "default"
_CONTROLS = ("ready", "init", "first-result", "steady")
_COUNTED = ("size", VERIFICATION)


@dataclass(frozen=True)
class VariantComparison:
    """A variant of both bundles, or of one of them.

    Attributes:
        old: Its name in the old one, None if it is new.
        new: Its name in the new one, None if it is missing.
        failures: Why it fails, a sentence each.
        hardware: Differences of the hardware it was measured on.
        remarks: Further facts for the reader, a sentence each.
    """

    old: str | None
    new: str | None
    target: str
    outcome: Outcome
    failures: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    hardware: tuple[Difference, ...] = ()
    differences: tuple[Difference, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two bundles.

    Attributes:
        outcome: Whether the new one may take the old one's place: the worst of its variants'.
        variants: Those of the old one in its order, then those that are new.
    """

    model: str
    outcome: Outcome
    differences: tuple[Difference, ...]
    variants: tuple[VariantComparison, ...]


def compare(
    old: Sequence[Manifest],
    new: Sequence[Manifest],
    *,
    limits: RegressionLimits | None = None,
    across_hardware: bool = False,
    partial: bool = False,
) -> Comparison:
    """Compares two versions of a bundle, variant by variant, as they are shipped.

    A variant's counterpart has the same target and name, preferably from the same hardware. A missing variant
    or figure is a regression.

    Args:
        old: The manifests of the current version: one per machine that prepared it, the last one first.
        new: Those of the version that is to replace it.
        limits: How much worse each figure may be; 10 % by default.
        across_hardware: Whether to compare figures from different hardware.
        partial: Whether the new one comes from some of the old one's machines: missing variants are remarks
            then, as long as one is there.
    """
    rules = limits or RegressionLimits()
    variants = []
    pairs = tuple(pair_snapshots(list_snapshots(old), list_snapshots(new)))
    partial = partial and any(was is not None and now is not None for was, now in pairs)
    for was, now in pairs:
        if was is not None and now is not None:
            variants.append(_compare_pair(was, now, rules, across_hardware=across_hardware))
        elif was is not None:
            variants.append(_miss(was, new[0], partial=partial))
        elif now is not None:
            variants.append(_introduce(now, rules))
    outcomes: list[Outcome] = [variant.outcome for variant in variants]
    outcome = max(outcomes, key=_OUTCOMES.index, default=_OUTCOMES[0])
    return Comparison(new[0].name, outcome, compare_manifests(old[0], new[0]), tuple(variants))


def _miss(was: VariantSnapshot, new: Manifest, *, partial: bool) -> VariantComparison:
    name, target = was.name, was.record.target
    reasons = [missing.reason for missing in new.missing_targets if missing.target == target]
    if partial:
        return VariantComparison(name, None, target, "ok", remarks=("it is missing, and was not compared",))
    failure = ": ".join(["it no longer exists", *reasons])
    return VariantComparison(name, None, target, "regression", (failure,))


def _introduce(now: VariantSnapshot, limits: RegressionLimits) -> VariantComparison:
    counted = _read_counted(now)
    changes = tuple(compare_figure(figure, None, counted.get(figure), limits) for figure in _COUNTED)
    failures = tuple(_regressions(changes))
    outcome: Outcome = "regression" if failures else "ok"
    name, target = now.name, now.record.target
    return VariantComparison(None, name, target, outcome, failures, changes, remarks=("it is new",))


def _compare_pair(
    was: VariantSnapshot, now: VariantSnapshot, limits: RegressionLimits, *, across_hardware: bool
) -> VariantComparison:
    facts = read_hardware_facts(was), read_hardware_facts(now)
    hardware = list_differences(*facts)
    is_comparable = across_hardware or not hardware
    measured = _measured(was.record, now.record, limits, is_comparable=is_comparable)
    changes = (*measured, *_counted(was, now, limits))
    regressions = (*_regressions(changes), *_losses(changes))
    unlike = tuple(_incomparable(changes, hardware if not is_comparable else ()))
    remarks = [] if any(facts) else ["neither says on which hardware it was measured"]
    remarks += [] if hardware else _controls(was.record, now.record, limits)
    return VariantComparison(
        old=was.name,
        new=now.name,
        target=now.record.target,
        outcome="regression" if regressions else "incomparable" if unlike else "ok",
        failures=(*regressions, *unlike),
        changes=changes,
        hardware=hardware,
        differences=compare_snapshots(was, now),
        remarks=tuple(remarks),
    )


def _measured(
    was: VariantRecord, now: VariantRecord, limits: RegressionLimits, *, is_comparable: bool
) -> Iterator[Change]:
    for cache in _CACHES:
        old, new = (_read(record, cache, shipped_plan(record)) for record in (was, now))
        is_alike = is_comparable and _has_same_shapes(was, now, cache)
        for name in dict.fromkeys((*old, *new)):
            pair = old.get(name), new.get(name)
            yield compare_figure(name, *pair, limits, cache=cache, is_comparable=is_alike)


def _has_same_shapes(was: VariantRecord, now: VariantRecord, cache: str) -> bool:
    before, after = find_measurement(was, cache=cache), find_measurement(now, cache=cache)
    return before is None or after is None or before.shapes == after.shapes


def _read(record: VariantRecord, cache: str, plan: str) -> dict[str, Samples]:
    """Returns a plan's measured figures by their names; what is no number was not measured."""
    figures = find_plan(find_measurement(record, cache=cache), plan)
    found = {} if figures is None else {name: getattr(figures, field) for name, field in MEASURED.items()}
    return {name: one for name, one in found.items() if one is not None and 0 <= one.median < math.inf}


def _counted(was: VariantSnapshot, now: VariantSnapshot, limits: RegressionLimits) -> Iterator[Change]:
    """Yields what is the same wherever it is looked at."""
    old, new = _read_counted(was), _read_counted(now)
    known = [name for name in _COUNTED if name in old or name in new]
    return (compare_figure(name, old.get(name), new.get(name), limits) for name in known)


def _read_counted(snapshot: VariantSnapshot) -> dict[str, Samples]:
    """Returns the size of a variant's files in MB, and its largest error in units of the tolerance."""
    size_mb = None if snapshot.size_bytes is None else snapshot.size_bytes / 2**20
    found = {"size": size_mb, VERIFICATION: worst_error(snapshot.record)}
    return {name: Samples.of([value]) for name, value in found.items() if value is not None}


def _regressions(changes: Sequence[Change]) -> Iterator[str]:
    return (str(change) for change in changes if change.verdict == "regression")


def _losses(changes: Sequence[Change]) -> Iterator[str]:
    missing = [change for change in changes if change.verdict == "missing"]
    for cache in dict.fromkeys(change.cache for change in missing):
        names = ", ".join(change.figure for change in missing if change.cache == cache)
        yield f"missing{f', {cache} cache' if cache else ''}: {names}"


def _incomparable(changes: Sequence[Change], hardware: Sequence[Difference]) -> Iterator[str]:
    if not any(change.verdict == "incomparable" for change in changes):
        return
    if hardware:
        what = "; ".join(f"{one.what} {one.old or '?'} → {one.new or '?'}" for one in hardware)
        yield f"not comparable, measured on different hardware: {what}"
    else:
        yield "not comparable, measured with inputs of different shapes"


def _controls(was: VariantRecord, now: VariantRecord, limits: RegressionLimits) -> list[str]:
    """Returns what plain ONNX Runtime's own figures, from the same rounds, say about the machine."""
    if _DEFAULT in (shipped_plan(was), shipped_plan(now)):
        return []
    remarks = []
    for cache in _CACHES:
        old, new = (_read(record, cache, _DEFAULT) for record in (was, now))
        is_alike = _has_same_shapes(was, now, cache)
        changes = [
            compare_figure(name, old[name], new[name], limits, cache=cache, is_comparable=is_alike)
            for name in _CONTROLS
            if name in old and name in new
        ]
        moved = [f"{c.figure} {c.ratio:.2f}×" for c in changes if c.verdict in ("regression", "improvement")]
        if moved:
            remarks.append(
                f"plain ONNX Runtime, measured beside it, changed too ({cache} cache: {', '.join(moved)}): "
                "so did the machine, the source or ONNX Runtime itself"
            )
    return remarks
