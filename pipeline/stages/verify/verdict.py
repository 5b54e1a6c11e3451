"""What the comparisons of one verification come to: the record, and the error if there is one. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.bundle.loader_config import Tolerance
from pipeline.bundle.manifest import OutputError
from pipeline.runtime.compare import Comparison, Element
from pipeline.spec.models import Verify

_NOISE_MARGIN = 2.0
"""How far above the noise floor a difference may be and still be called noise."""


@dataclass(frozen=True)
class Judged:
    """One output of one sample, compared.

    Attributes:
        shapes: Input shapes of the sample, as `name=[…]` joined by spaces.
        tolerance: What was allowed.
        comparison: What came out.
    """

    shapes: str
    tolerance: Tolerance
    comparison: Comparison


def tolerance_of(verify: Verify, output: str) -> Tolerance:
    """Returns an output's tolerance; tensors of a sequence or map, `NAME[…]`, have that of `NAME`."""
    own = verify.outputs.get(output) or verify.outputs.get(output.partition("[")[0])
    return Tolerance(verify.rtol, verify.atol) if own is None else Tolerance(own.rtol, own.atol)


def find_worst(judged: Sequence[Judged]) -> dict[str, Judged]:
    """Returns every output's worst sample: a failed one before any other, then by ratio."""
    worst: dict[str, Judged] = {}
    for item in judged:
        name = item.comparison.name
        if name not in worst or _badness(item.comparison) > _badness(worst[name].comparison):
            worst[name] = item
    return worst


def _badness(comparison: Comparison) -> tuple[bool, float]:
    return not comparison.ok, comparison.ratio


def build_errors(judged: Sequence[Judged]) -> tuple[OutputError, ...]:
    """Returns the record of every output: its worst element, and its largest differences over all samples."""
    return tuple(
        _build_error(item, [other.comparison for other in judged if other.comparison.name == name])
        for name, item in find_worst(judged).items()
    )


def _build_error(worst: Judged, of_output: Sequence[Comparison]) -> OutputError:
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
    """Returns the indented lines of an error: the worst element, how many outputs fail, the noise floor.

    Args:
        judged: Candidate against reference; at least one failed.
        noise: The noise floor, by output.
    """
    worst = worst_failure(judged)
    outputs = find_worst(judged)
    failed = [name for name, item in outputs.items() if not item.comparison.ok]
    samples = {item.shapes for item in judged if not item.comparison.ok}
    lines = [
        f"output {worst.comparison.name!r} of sample {worst.shapes}: {_describe_worst(worst)}",
        _describe_extent(worst.comparison),
        f"outside tolerance: {len(failed)} of {len(outputs)} outputs ({_shorten(failed)}), "
        f"{len(samples)} of {len({item.shapes for item in judged})} sample shapes",
        _describe_noise(noise.get(worst.comparison.name)),
    ]
    return "\n".join(f"  {line}" for line in lines)


def worst_failure(judged: Sequence[Judged]) -> Judged:
    """Returns the comparison that is furthest out of its tolerance."""
    return max(judged, key=lambda item: _badness(item.comparison))


def _describe_worst(item: Judged) -> str:
    comparison, tolerance = item.comparison, item.tolerance
    if comparison.expected is None:
        return comparison.reason
    return (
        f"{comparison.reason}\n  expected {_show(comparison.expected)} at {list(comparison.worst_index)}, "
        f"got {_show(comparison.got)} (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
    )


def _describe_extent(comparison: Comparison) -> str:
    return (
        f"{comparison.wrong or comparison.count} of its {comparison.count} elements are wrong; "
        f"largest difference {comparison.max_abs:.3g}, relative {comparison.max_rel:.3g}"
    )


def _describe_noise(noise: OutputError | None) -> str:
    if noise is None:
        return "noise floor: unknown, the source does not run with full optimisation"
    return (
        f"noise floor (the source with full optimisation on CPU): "
        f"largest difference {noise.max_abs:.3g}, {noise.ratio:.2g} of the tolerance"
    )


def _show(element: Element | None) -> str:
    return f"{element:.8g}" if isinstance(element, float | complex) else repr(element)


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def suggest(worst: Judged, noise: OutputError | None, *, step: str, in_tf32: bool) -> str:
    """Returns what a user can do about a failure: honest about whose fault it is.

    Args:
        worst: The failure.
        noise: The noise floor of the same output.
        step: The ladder step the candidate was written at.
        in_tf32: Whether the candidate ran on CUDA, which may multiply float32 in TF32.
    """
    if noise is not None and _is_noise(worst.comparison, noise):
        room = _NOISE_MARGIN * noise.ratio
        rtol, atol = worst.tolerance.rtol * room, worst.tolerance.atol * room
        return (
            "ONNX Runtime's own optimisation of the source is outside this tolerance too; if its answers "
            f"will do, write verify: {{rtol: {rtol:.1e}, atol: {atol:.1e}}} into the spec"
        )
    if in_tf32 and math.isfinite(worst.comparison.ratio):
        return (
            "CUDA multiplies float32 in TF32; for exact float32: runtime: {cuda: {use_tf32: 0}} in the spec"
        )
    lower = {"all": "extended", "all-reduced": "extended", "extended": "basic"}.get(step)
    if lower is not None:
        return f"optimise less: optimize: {{level: {lower}}} in the spec"
    return "compare the written model with its source by hand; nothing was optimised that could be left out"


def _is_noise(failure: Comparison, noise: OutputError) -> bool:
    """Says whether a failure is no more than what optimising the source by itself brings."""
    # A record's ratio is never infinite: a wrong NaN is written as the largest number there is.
    is_finite = math.isfinite(failure.ratio) and noise.ratio < sys.float_info.max
    return noise.ratio > 1 and is_finite and failure.ratio <= _NOISE_MARGIN * noise.ratio
