"""Answers of sessions to the same samples, compared output by output: the record, and the error."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import Tolerance
from ortprep.bundle.manifest import OutputError
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import Answers, read_answer, write_answers
from ortprep.errors import ChildTimeoutError, ResourceError
from ortprep.runtime.verification.compare import Element, OutputComparison, compare_output
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context
from ortprep.stages.core.inputs.samples import Sample


def run_samples(context: Context, plan: SessionPlan, samples: Sequence[Sample], folder: Path) -> Answers:
    """Has a session answer every sample, in a process of its own, into a folder.

    Raises:
        ResourceError: It took longer than the spec allows.
        StageError: A run failed.
        OSError: The disk is full; that is not the model's fault, so it is no `PipelineError`.
        PipelineError: Anything else that keeps it from answering.
    """
    timeout_s = context.spec.optimize.timeout_s
    try:
        return write_answers(plan, [sample.path for sample in samples], folder, timeout_s=timeout_s)
    except ChildTimeoutError as error:
        raise ResourceError(
            f"verification took too long: {describe(context)}\n  {error.message}",
            hint=f"raise the deadline in the spec: optimize: {{timeout_s: {timeout_s * 2:g}}}",
        ) from error


def judge(spec: ModelSpec, samples: Sequence[Sample], *, expected: Answers, got: Answers) -> Iterator[Judged]:
    """Yields every output of every sample, compared.

    Raises:
        StageError: An answer's file is gone or damaged.
    """
    for sample, left, right in zip(samples, expected.samples, got.samples, strict=True):
        for reference, candidate in zip(left, right, strict=True):
            name = reference.output
            tolerance = spec.verify.tolerance_of(name)
            comparison = compare_output(read_answer(reference), read_answer(candidate), tolerance, name=name)
            yield Judged(sample.shapes, tolerance, comparison)


def describe(context: Context) -> str:
    """Returns what is verified, for messages: `NAME/VARIANT`."""
    return f"{context.spec.name}/{context.variant}"


_NOISE_MARGIN = 2.0
"""How far above the noise floor a difference may be and still be called noise."""


@dataclass(frozen=True)
class Judged:
    """One output of one sample, compared."""

    shapes: str
    tolerance: Tolerance
    comparison: OutputComparison


def find_worst(judged: Sequence[Judged]) -> dict[str, Judged]:
    """Returns every output's worst sample: a failed one before any other, then by ratio."""
    worst: dict[str, Judged] = {}
    for item in judged:
        name = item.comparison.name
        if name not in worst or _badness(item.comparison) > _badness(worst[name].comparison):
            worst[name] = item
    return worst


def _badness(comparison: OutputComparison) -> tuple[bool, float]:
    return not comparison.ok, comparison.ratio


def build_errors(judged: Sequence[Judged]) -> tuple[OutputError, ...]:
    """Returns the record of every output: its worst element, and its largest differences over all samples."""
    return tuple(
        _build_error(item, [other.comparison for other in judged if other.comparison.name == name])
        for name, item in find_worst(judged).items()
    )


def _build_error(worst: Judged, of_output: Sequence[OutputComparison]) -> OutputError:
    comparison = worst.comparison
    return OutputError(
        output=comparison.name,
        shapes=worst.shapes,
        max_abs=_finite(max(other.max_abs for other in of_output)),
        max_rel=_finite(max(other.max_rel for other in of_output)),
        worst_index=comparison.worst_index,
        worst_expected=_number(comparison.expected),
        worst_got=_number(comparison.got),
        ratio=_finite(comparison.ratio),
    )


def _number(element: Element | None) -> float:
    """Returns an element as a record's float: a complex number's magnitude, 0 for what is no number."""
    if element is None or isinstance(element, str):
        return 0.0
    return _finite(abs(element)) if isinstance(element, complex) else _finite(float(element))


def _finite(value: float) -> float:
    """Returns the nearest number JSON can hold: it has no infinities, and no NaN."""
    if math.isnan(value):
        return 0.0
    return max(min(value, sys.float_info.max), -sys.float_info.max)


def describe_failure(judged: Sequence[Judged], noise: Mapping[str, OutputError]) -> str:
    """Returns the indented lines of an error: the worst element, how many outputs fail, the noise floor."""
    worst = worst_failure(judged)
    comparison, tolerance = worst.comparison, worst.tolerance
    what = comparison.reason
    if comparison.expected is not None:
        what += (
            f"\n  expected {_show(comparison.expected)} at {list(comparison.worst_index)}, "
            f"got {_show(comparison.got)} (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
        )
    failed = list(dict.fromkeys(item.comparison.name for item in judged if not item.comparison.ok))
    outputs, shapes = {item.comparison.name for item in judged}, {item.shapes for item in judged}
    failed_shapes = {item.shapes for item in judged if not item.comparison.ok}
    named = ", ".join(failed[:4]) + (", …" if len(failed) > 4 else "")
    floor = noise.get(comparison.name)
    lines = [
        f"output {comparison.name!r} of sample {worst.shapes}: {what}",
        f"{comparison.wrong or comparison.count} of its {comparison.count} elements are wrong; "
        f"largest difference {comparison.max_abs:.3g}, relative {comparison.max_rel:.3g}",
        f"outside tolerance: {len(failed)} of {len(outputs)} outputs ({named}), "
        f"{len(failed_shapes)} of {len(shapes)} sample shapes",
        "noise floor: unknown, the source does not run with full optimisation"
        if floor is None
        else "noise floor (the source with full optimisation on CPU): "
        f"largest difference {floor.max_abs:.3g}, {floor.ratio:.2g} of the tolerance",
    ]
    return "\n".join(f"  {line}" for line in lines)


def worst_failure(judged: Sequence[Judged]) -> Judged:
    """Returns the comparison that is furthest out of its tolerance."""
    return max(judged, key=lambda item: _badness(item.comparison))


def _show(element: Element | None) -> str:
    return f"{element:.8g}" if isinstance(element, float | complex) else repr(element)


def suggest(worst: Judged, noise: OutputError | None, *, step: str, in_tf32: bool) -> str:
    """Returns what a user can do about a failure: honest about whose fault it is."""
    if noise is not None and _is_noise(worst.comparison, noise):
        room = _NOISE_MARGIN * noise.ratio
        rtol, atol = worst.tolerance.rtol * room, worst.tolerance.atol * room
        return (
            "ONNX Runtime's own optimisation of the source is outside this tolerance too; if its answers "
            f"are acceptable, set verify: {{rtol: {rtol:.1e}, atol: {atol:.1e}}} in the spec"
        )
    if in_tf32 and math.isfinite(worst.comparison.ratio):
        return (
            "CUDA multiplies float32 in TF32; for exact float32: runtime: {cuda: {use_tf32: 0}} in the spec"
        )
    lower = {"all": "extended", "all-reduced": "extended", "extended": "basic"}.get(step)
    if lower is not None:
        return f"optimise less: optimize: {{level: {lower}}} in the spec"
    return "compare the written model with its source by hand; no optimisation is left to turn off"


def _is_noise(failure: OutputComparison, noise: OutputError) -> bool:
    """Returns whether a failure is no more than what optimising the source by itself brings."""
    # A record's ratio is never infinite: a wrong NaN is written as the largest number there is.
    is_finite = math.isfinite(failure.ratio) and noise.ratio < sys.float_info.max
    return noise.ratio > 1 and is_finite and failure.ratio <= _NOISE_MARGIN * noise.ratio
