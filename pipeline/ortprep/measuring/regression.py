"""The gate between two versions of a bundle: may the new one take the old one's place? Pure.

Variants are compared as they are shipped: what became worse, beyond a limit and the noise.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortprep.bundle.environment import list_facts
from ortprep.bundle.figures import Samples
from ortprep.bundle.manifest import Manifest, VariantRecord, sum_folders
from ortprep.measuring.change import MEASURED, VERIFICATION, Change, RegressionLimits, compare_figure
from ortprep.measuring.shipped import (
    DEFAULT,
    FORKED,
    PORTABLE,
    find_measurement,
    find_plan,
    shipped_plan,
    worst_error,
)

Outcome: TypeAlias = Literal["ok", "not comparable", "regression"]
"""Nothing became worse; nothing that could be compared did; something did."""

_OUTCOMES: tuple[Outcome, ...] = ("ok", "not comparable", "regression")
_CONTROLS = ("ready", "init", "first-result", "steady")

_HARDWARE = {
    "architecture": "hardware.machine",
    "processor": "hardware.cpu_model",
    "cores": "hardware.cores",
}
_GPU = {"GPU": "hardware.gpus.0.name", "compute capability": "hardware.gpus.0.compute_capability"}
"""What figures depend on, by its name for users, and its name among the facts of a bundle."""


@dataclass(frozen=True)
class VariantComparison:
    """A variant of both bundles, or of one of them.

    Attributes:
        old: Its name in the old one, None if it is new.
        new: Its name in the new one, None if it is missing.
        failures: Reasons why it fails, a sentence each.
        hardware: Differences of the hardware it was measured on: `cores 2 → 4`.
        remarks: Further facts for the reader, a sentence each.
    """

    old: str | None
    new: str | None
    target: str
    outcome: Outcome
    failures: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    hardware: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two bundles.

    Attributes:
        outcome: Whether the new one may take the old one's place: the worst of its variants'.
        variants: Variants of the old one in its order, then new ones.
    """

    model: str
    outcome: Outcome
    variants: tuple[VariantComparison, ...]


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A variant of a bundle; a version from several machines has several of one name, which are numbered.

    Attributes:
        facts: What its bundle was made with, by dotted names.
        sizes: The sizes of its bundle's folders, in bytes.
    """

    name: str
    record: VariantRecord
    facts: Mapping[str, str]
    sizes: Mapping[str, int]

    @property
    def hardware(self) -> dict[str, str]:
        """The hardware that its figures depend on; {} if it was not recorded."""
        wanted = _HARDWARE if self.record.target == "cpu" else {**_HARDWARE, **_GPU}
        return {name: self.facts[key] for name, key in wanted.items() if key in self.facts}


def compare(
    old: Sequence[Manifest],
    new: Sequence[Manifest],
    *,
    limits: RegressionLimits | None = None,
    partial: bool = False,
) -> Comparison:
    """Compares two versions of a bundle, variant by variant, as they are shipped.

    A variant's counterpart has the same target and name, preferably from the same hardware. A missing variant
    or figure is a regression.

    Args:
        old: The manifests of the current version: one per machine that prepared it, the last one first.
        new: The manifests of the version that is to replace it.
        limits: Limits of how much worse each figure may be; 10 % by default.
        partial: Whether the new one comes from some of the old one's machines: missing variants are remarks
            then, as long as one is there.
    """
    rules = limits or RegressionLimits()
    pairs = _pair(_list_snapshots(old), _list_snapshots(new))
    partial = partial and any(was is not None and now is not None for was, now in pairs)
    variants = []
    for was, now in pairs:
        if now is not None:
            variants.append(_compare_variant(was, now, rules))
        elif was is not None:
            variants.append(_miss(was, partial=partial))
    outcomes: list[Outcome] = [variant.outcome for variant in variants]
    outcome = max(outcomes, key=_OUTCOMES.index, default=_OUTCOMES[0])
    return Comparison(new[0].name, outcome, tuple(variants))


def _list_snapshots(manifests: Sequence[Manifest]) -> list[_Snapshot]:
    """Returns the variants of a version, numbered where several machines prepared one."""
    found = []
    numbers: Counter[str] = Counter()
    for manifest in manifests:
        facts, sizes = list_facts(manifest.environment), sum_folders(manifest)
        for record in manifest.variants:
            numbers[record.name] += 1
            number = numbers[record.name]
            name = record.name if number == 1 else f"{record.name} ({number})"
            found.append(_Snapshot(name, record, facts, sizes))
    return found


def _pair(
    old: Sequence[_Snapshot], new: Sequence[_Snapshot]
) -> list[tuple[_Snapshot | None, _Snapshot | None]]:
    """Returns every variant with its counterpart, preferably from the same hardware, or None."""
    partners: dict[_Snapshot, _Snapshot] = {}
    free = dict.fromkeys(new)

    def find_partners(read_key: Callable[[_Snapshot], object]) -> None:
        candidates: defaultdict[object, deque[_Snapshot]] = defaultdict(deque)
        for now in free:
            candidates[read_key(now)].append(now)
        for was in old:
            if was not in partners and candidates[read_key(was)]:
                partners[was] = candidates[read_key(was)].popleft()
                del free[partners[was]]

    find_partners(lambda one: (one.record.target, one.record.name, *one.hardware.items()))
    find_partners(lambda one: (one.record.target, one.record.name))
    return [*((was, partners.get(was)) for was in old), *((None, now) for now in free)]


def _miss(was: _Snapshot, *, partial: bool) -> VariantComparison:
    name, target = was.name, was.record.target
    if partial:
        return VariantComparison(name, None, target, "ok", remarks=("it is missing, and was not compared",))
    return VariantComparison(name, None, target, "regression", ("it no longer exists",))


def _compare_variant(was: _Snapshot | None, now: _Snapshot, limits: RegressionLimits) -> VariantComparison:
    """Compares a variant with its counterpart; a new one fails if it answers wrongly."""
    hardware: tuple[str, ...] = ()
    old, new, remarks = {}, _read_figures(now), ["it is new"]
    alike = {"": True}
    if was is not None:
        hardware = _list_differences(was.hardware, now.hardware)
        caches = (_deciding(was.record, now.record), "cold")
        old, new = _read_figures(was, *caches), _read_figures(now, *caches)
        for cache in caches:
            alike[cache] = not hardware and _has_same_shapes(was.record, now.record, cache)
        known = was.hardware or now.hardware
        remarks = [] if known else ["neither says on which hardware it was measured"]
        remarks += [] if hardware else _controls(was.record, now.record, limits)
    changes = []
    for name, cache in dict.fromkeys((*old, *new)):
        pair, is_comparable = (old.get((name, cache)), new.get((name, cache))), alike[cache]
        changes.append(compare_figure(name, *pair, limits, cache=cache, is_comparable=is_comparable))
    regressions = (*(str(one) for one in changes if one.verdict == "regression"), *_losses(changes))
    unlike = tuple(_why_not_comparable(changes, hardware))
    return VariantComparison(
        old=None if was is None else was.name,
        new=now.name,
        target=now.record.target,
        outcome="regression" if regressions else "not comparable" if unlike else "ok",
        failures=(*regressions, *unlike),
        changes=tuple(changes),
        hardware=hardware,
        remarks=tuple(remarks),
    )


def _deciding(was: VariantRecord, now: VariantRecord) -> str:
    """Returns which measurement decided what ships: that of forked workers, if both versions have it."""
    return FORKED if all(find_measurement(one, cache=FORKED) for one in (was, now)) else "warm"


def _has_same_shapes(was: VariantRecord, now: VariantRecord, cache: str) -> bool:
    before, after = find_measurement(was, cache=cache), find_measurement(now, cache=cache)
    return before is None or after is None or before.shapes == after.shapes


def _read(record: VariantRecord, cache: str, plan: str) -> dict[str, Samples]:
    """Returns a plan's measured figures by their names; what is no number was not measured."""
    figures = find_plan(find_measurement(record, cache=cache), plan)
    found = {} if figures is None else {name: getattr(figures, field) for name, field in MEASURED.items()}
    return {name: one for name, one in found.items() if one is not None and 0 <= one.median < math.inf}


def _read_figures(one: _Snapshot, *caches: str) -> dict[tuple[str, str], Samples]:
    """Returns the figures of what a variant ships, by name and page cache: those measured with `caches`.

    Those that are counted have the cache "": the size of its files in MB, and its largest error in units of
    the tolerance.
    """
    plan = shipped_plan(one.record)
    figures = {
        (name, cache): samples for cache in caches for name, samples in _read(one.record, cache, plan).items()
    }
    # Where the portable variant was faster, its files are all there is.
    size_bytes = one.sizes.get(PORTABLE if plan == PORTABLE else one.record.name)
    counted = {
        "size": None if size_bytes is None else size_bytes / 2**20,
        VERIFICATION: worst_error(one.record),
    }
    return figures | {(name, ""): Samples.of([value]) for name, value in counted.items() if value is not None}


def _losses(changes: Sequence[Change]) -> Iterator[str]:
    missing = [change for change in changes if change.verdict == "missing"]
    for cache in dict.fromkeys(change.cache for change in missing):
        names = ", ".join(change.figure for change in missing if change.cache == cache)
        yield f"missing{f', {cache} cache' if cache else ''}: {names}"


def _why_not_comparable(changes: Sequence[Change], hardware: Sequence[str]) -> Iterator[str]:
    if any(change.verdict == "not comparable" for change in changes):
        different = f"on different hardware: {'; '.join(hardware)}"
        where = different if hardware else "with inputs of different shapes"
        yield f"not comparable, measured {where}"


def _controls(was: VariantRecord, now: VariantRecord, limits: RegressionLimits) -> list[str]:
    """Returns what plain ONNX Runtime's own figures, from the same rounds, say about the machine."""
    if DEFAULT in (shipped_plan(was), shipped_plan(now)):
        return []
    cache = _deciding(was, now)
    old, new = _read(was, cache, DEFAULT), _read(now, cache, DEFAULT)
    is_alike = _has_same_shapes(was, now, cache)
    changes = [
        compare_figure(name, old[name], new[name], limits, cache=cache, is_comparable=is_alike)
        for name in _CONTROLS
        if name in old and name in new
    ]
    moved = [f"{c.figure} {c.ratio:.2f}×" for c in changes if c.verdict in ("regression", "improvement")]
    if not moved:
        return []
    what = f"plain ONNX Runtime, measured beside it, changed too ({', '.join(moved)})"
    return [f"{what}: so did the machine, the source or ONNX Runtime itself"]


def _list_differences(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return tuple(f"{name} {old.get(name) or '?'} → {new.get(name) or '?'}" for name in names)
