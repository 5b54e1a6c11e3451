"""The shipped plan of a variant in a manifest: its figures and the errors of its answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.manifest import MeasurementRecord, VariantRecord, VerificationRecord
from ortprep.tables import count_of

DEFAULT = "default"
"""The plan every other one is compared with: the source model in plain ONNX Runtime, `ORT_ENABLE_ALL`."""

PREPARED = "prepared"
"""What was prepared; it ships where nothing was measured, so nothing was decided."""

FIRST = "first phase"
"""The plan that serves until the prepared one is ready, where the search found one worth it."""

PARENT = "unconverted"
"""The prepared variant that one in another precision is compared with: the same in fp32."""

PORTABLE = "portable"
"""The portable variant, which a bundle may ship in place of another."""

FORKED = "forked"
"""A fork of a process that opened what ships with `load_before_fork`; its times begin at the fork."""


def shipped_plan(record: VariantRecord) -> str:
    """Returns the name of the plan that a variant ships."""
    return record.decision.shipped if record.decision else PREPARED


def find_measurement(record: VariantRecord, *, cache: str) -> MeasurementRecord | None:
    """Returns what was measured with a `warm` or `cold` page cache, None if nothing was."""
    return next((one for one in record.measurements if one.cache == cache), None)


def describe_cache(measurement: MeasurementRecord) -> str:
    """Returns how plans were measured: with which page cache, or as forked workers, which have it warm."""
    return "forked workers" if measurement.cache == FORKED else f"{measurement.cache} cache"


def count_inputs(verification: VerificationRecord) -> str:
    """Returns on how many inputs a variant was verified: samples of the spec, or seeded ones."""
    return count_of(verification.samples, "sample" if verification.inputs == "samples" else "seeded input")


def find_plan(measurement: MeasurementRecord | None, name: str) -> PlanFigures | None:
    """Returns the figures of a plan, None if there are none."""
    plans = measurement.plans if measurement else ()
    return next((plan for plan in plans if plan.plan == name), None)


def shipped_figures(record: VariantRecord) -> PlanFigures | None:
    """Returns what the shipped plan costs with a warm page cache, None if that was not measured."""
    return find_plan(find_measurement(record, cache="warm"), shipped_plan(record))


def worst_error(record: VariantRecord) -> float | None:
    """Returns the largest error of any output in units of its tolerance, None if nothing was compared.

    Of a variant in another precision, in units of what its gate allows. Above 1 is a failure; so is NaN,
    which is returned if it is among them.
    """
    ratios = [error.ratio for error in record.verification.errors]
    ratios += list(_gate_ratios(record))
    return max(ratios, key=lambda ratio: (math.isnan(ratio), ratio), default=None)


def _gate_ratios(record: VariantRecord) -> Iterator[float]:
    gate = {} if record.conversion is None else record.conversion.gate
    for accuracy in record.accuracy:
        bounds = gate.get(accuracy.output) or gate.get("", {})
        for name, bound in bounds.items():
            value = getattr(accuracy, name, None)
            if value is not None and name in _ERRORS:
                yield _divide(_ERRORS[name](value), _ERRORS[name](bound))


def _divide(error: float, allowed: float) -> float:
    return error / allowed if allowed else 0.0 if error == 0 else math.inf


_ERRORS: Mapping[str, Callable[[float], float]] = {
    "max_abs": float,
    "snr_db": lambda decibels: 10 ** min(-decibels / 20, 300.0),
    "top1": lambda share: 1 - share,
}
"""What of a figure is an error: 0 if nothing is wrong, and in proportion to how much is."""
