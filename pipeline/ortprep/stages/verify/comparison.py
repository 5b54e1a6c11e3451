"""Answers of sessions to the same samples, compared output by output: the record, and the error."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import Tolerance
from ortprep.bundle.manifest import OutputError
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import Answers, read_answer, write_answers
from ortprep.errors import ChildTimeoutError, StageError
from ortprep.runtime.tensors.compare import Element, OutputComparison, compare_output
from ortprep.spec.models import NOISE_MARGIN
from ortprep.stages.core.contract import Context
from ortprep.stages.core.samples import Sample


def run_samples(context: Context, plan: SessionPlan, samples: Sequence[Sample], folder: Path) -> Answers:
    """Has a session answer every sample, in a process of its own, into a folder.

    Raises:
        StageError: A run failed, or all of them took longer than the spec allows.
        OSError: The disk is full; that is not the model's fault, so it is no `PipelineError`.
        PipelineError: Anything else that keeps it from answering.
    """
    timeout_s = context.spec.optimize.timeout_s
    try:
        return write_answers(plan, [sample.path for sample in samples], folder, timeout_s=timeout_s)
    except ChildTimeoutError as error:
        raise StageError(
            f"verification took too long: {context.subject}\n  {error.message}",
            hint=f"raise the deadline in the spec: optimize: {{timeout_s: {timeout_s * 2:g}}}",
        ) from error


def judge(
    tolerances: Mapping[str, Tolerance], samples: Sequence[Sample], *, expected: Answers, got: Answers
) -> Iterator[SampleComparison]:
    """Yields every output of every sample, compared within its tolerance, that of "" if it has none.

    Raises:
        StageError: An answer's file is gone or damaged.
    """
    for sample, left, right in zip(samples, expected.samples, got.samples, strict=True):
        for reference, candidate in zip(left, right, strict=True):
            name = reference.output
            tolerance = tolerances.get(name, tolerances[""])
            comparison = compare_output(read_answer(reference), read_answer(candidate), tolerance, name=name)
            yield SampleComparison(sample.shapes, tolerance, comparison)


@dataclass(frozen=True)
class SampleComparison:
    """One output of one sample, compared."""

    shapes: str
    tolerance: Tolerance
    comparison: OutputComparison


def find_worst(judged: Iterable[SampleComparison]) -> SampleComparison:
    """Returns the comparison that is furthest out of its tolerance: a failed one, then by ratio."""
    return max(judged, key=lambda item: (not item.comparison.ok, item.comparison.ratio))


def build_errors(judged: Iterable[SampleComparison]) -> tuple[OutputError, ...]:
    """Returns the record of every output: its worst element, and its largest differences over all samples."""
    by_output: dict[str, list[SampleComparison]] = {}
    for item in judged:
        by_output.setdefault(item.comparison.name, []).append(item)
    errors = []
    for output, items in by_output.items():
        worst = find_worst(items)
        errors.append(
            OutputError(
                output=output,
                shapes=worst.shapes,
                max_abs=_finite(max(item.comparison.max_abs for item in items)),
                max_rel=_finite(max(item.comparison.max_rel for item in items)),
                largest=_finite(max(item.comparison.largest for item in items)),
                share=max(one.comparison.wrong / max(1, one.comparison.count) for one in items),
                worst_index=worst.comparison.worst_index,
                worst_expected=_finite(worst.comparison.expected),
                worst_got=_finite(worst.comparison.got),
                ratio=_finite(max(map(_ratio, items))),
            )
        )
    return tuple(errors)


def _ratio(item: SampleComparison) -> float:
    """Returns the largest difference in units of what was tolerated, which may be the noise."""
    compared = item.comparison
    return compared.max_abs / item.tolerance.noise if compared.ok and compared.ratio > 1 else compared.ratio


def _finite(value: Element | None) -> float:
    """Returns the nearest number JSON can hold: a complex number's magnitude, 0 for what is no number."""
    if value is None or isinstance(value, str):
        return 0.0
    number = abs(value) if isinstance(value, complex) else float(value)
    return 0.0 if math.isnan(number) else max(min(number, sys.float_info.max), -sys.float_info.max)


def describe_failure(judged: Sequence[SampleComparison], noise: OutputError | None) -> str:
    """Returns the indented lines of an error: the worst element, which outputs fail, the noise floor.

    Args:
        judged: Every output of every sample; one failed.
        noise: Change of the worst output by optimising the source alone; None where it is unknown.
    """
    worst = find_worst(judged)
    comparison, tolerance = worst.comparison, worst.tolerance
    what = comparison.reason
    if comparison.expected is not None:
        what += (
            f"\n  expected {_show(comparison.expected)} at {list(comparison.worst_index)}, "
            f"got {_show(comparison.got)} (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
        )
    names = list(dict.fromkeys(item.comparison.name for item in judged if not item.comparison.ok))
    floor = "unknown" if noise is None else f"{noise.max_abs:.3g}, {noise.ratio:.2g} of the tolerance"
    lines = [
        f"output {comparison.name!r} of sample {worst.shapes}: {what}",
        f"{comparison.wrong or comparison.count} of its {comparison.count} elements are wrong; "
        f"largest difference {comparison.max_abs:.3g}, relative {comparison.max_rel:.3g}",
        f"outside tolerance: {len(names)} of {len({item.comparison.name for item in judged})} outputs "
        f"({', '.join(names[:4])}{', …' if len(names) > 4 else ''})",
        f"noise floor (the source with full optimisation on CPU): {floor}",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _show(element: Element | None) -> str:
    return f"{element:.8g}" if isinstance(element, float | complex) else repr(element)


def suggest(worst: SampleComparison, noise: OutputError | None, *, in_tf32: bool) -> str:
    """Returns what a user can do about a failure.

    Args:
        worst: The output that failed, on the sample where it is furthest out.
        noise: Change of that output by optimising the source alone; None where it is unknown.
        in_tf32: Whether CUDA may have multiplied in TF32.
    """
    ratio = worst.comparison.ratio
    # A record's ratio is never infinite: a wrong NaN is written as the largest number there is.
    if noise is not None and 1 < noise.ratio < sys.float_info.max and ratio <= NOISE_MARGIN * noise.ratio:
        room = NOISE_MARGIN * noise.ratio
        rtol, atol = worst.tolerance.rtol * room, worst.tolerance.atol * room
        return (
            "ONNX Runtime's own optimisation of the source is outside this tolerance too; if its answers "
            f"are acceptable, set verify: {{rtol: {rtol:.1e}, atol: {atol:.1e}}} in the spec"
        )
    if in_tf32 and math.isfinite(ratio):
        return (
            "CUDA multiplies float32 in TF32; for exact float32: runtime: {cuda: {use_tf32: 0}} in the spec"
        )
    return "optimise less: optimize: {level: extended} in the spec, or basic"
