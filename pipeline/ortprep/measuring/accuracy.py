"""Accuracy of a converted model: the distance of its outputs from its source's, and the gate that bounds it.

Arrays may be memory maps of any size: they are read in blocks, and computed in float64. Floats of any width
are compared with each other, since a conversion may narrow an output; other types must be equal.

- Signal-to-noise ratio: `10 · log10(Σ expected² / Σ (expected − got)²)` in dB, between −200 and 200.
  It is that of the worst sample: no average hides it.
- Top-1, of floats: the share of rows along the last axis whose largest element in the candidate (the first
  of equal ones) is a largest of the reference; NaN counts as the smallest. Of integers, booleans and
  strings: the share of equal elements. Over all samples; None where no row has two elements.
- A NaN or an infinity that only one side has is counted, and has no difference.
- A boolean counts as 0 or 1, a complex number as two elements without a rank; a string as 1, and a different
  string as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.children.answers import Answer, read_answer
from ortprep.runtime.tensors.compare import BLOCK_ELEMENTS, read_block
from ortprep.runtime.tensors.element_types import BFLOAT16, Array, dtype_name, widen

SNR_CAP_DB = 200.0
"""Signal-to-noise ratio of equal arrays; float64 itself has about 310 dB."""

_Floats: TypeAlias = NDArray[np.float64]


def compare_answers(
    expected: Sequence[Sequence[Answer]], got: Iterable[Mapping[str, Array]]
) -> tuple[OutputAccuracy, ...]:
    """Returns the accuracy of every output, in the source's order; samples in the same order on both sides.

    Args:
        expected: The source's answers, by sample.
        got: The converted model's answers by output, by sample; an iterator holds one sample's at a time.

    Raises:
        StageError: An answer's file is missing or damaged.
    """
    return compare_arrays(
        (reference.output, read_answer(reference), right.get(reference.output))
        for left, right in zip(expected, got, strict=True)
        for reference in left
    )


def compare_arrays(
    triples: Iterable[tuple[str, Array, Array | None]], *, block_elements: int = BLOCK_ELEMENTS
) -> tuple[OutputAccuracy, ...]:
    """Returns the accuracy of every output, given its name, expected array and array, once per sample.

    A sample that cannot be compared has a reason, of which the first is reported.
    """
    tallies: dict[str, list[_Tally]] = {}
    reasons: dict[str, str] = {}
    for output, expected, got in triples:
        samples = tallies.setdefault(output, [])
        if got is None:
            reasons.setdefault(output, "the converted model did not return it")
        elif mismatch := _compare_form(expected, got):
            reasons.setdefault(output, mismatch)
        else:
            samples.append(_compare(expected, got, block_elements))
    return tuple(_summarise(output, each, reasons.get(output, "")) for output, each in tallies.items())


def _summarise(output: str, tallies: Sequence[_Tally], reason: str) -> OutputAccuracy:
    samples = [sample for sample in tallies if sample.elements]
    judged = sum(sample.judged for sample in samples)
    return OutputAccuracy(
        output,
        elements=sum(sample.elements for sample in samples),
        max_abs=max((sample.max_abs for sample in samples), default=0.0),
        snr_db=min((sample.snr_db() for sample in samples), default=SNR_CAP_DB),
        top1=sum(sample.agreed for sample in samples) / judged if judged else None,
        nonfinite=sum(sample.nonfinite for sample in samples),
        reason=reason,
    )


def _compare_form(expected: Array, got: Array) -> str:
    types = dtype_name(expected.dtype), dtype_name(got.dtype)
    if types[0] != types[1] and not (_is_float(expected) and _is_float(got)):
        return f"element type: expected {types[0]}, got {types[1]}"
    if expected.shape != got.shape:
        return f"shape: expected {list(expected.shape)}, got {list(got.shape)}"
    return ""


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype == BFLOAT16


def _compare(expected: Array, got: Array, block_elements: int) -> _Tally:
    """Compares two arrays block by block, in whole rows."""
    row = expected.shape[-1] if _is_float(expected) and expected.ndim else 0
    tally = _Tally()
    step = max(block_elements // max(row, 1), 1) * max(row, 1)  # whole rows, at least one
    for start in range(0, expected.size, step):
        stop = min(start + step, expected.size)
        left, right = widen(read_block(expected, start, stop)), widen(read_block(got, start, stop))
        if row > 1:
            tally.agreed += _count_agreeing(left.reshape(-1, row), right.reshape(-1, row))
            tally.judged += len(left) // row
        elif left.dtype.kind not in "fc":
            tally.agreed += int(np.count_nonzero(left == right))
            tally.judged += len(left)
        tally.add(left, right)
    return tally


class _Tally:
    """The sums over one sample."""

    def __init__(self) -> None:
        self.elements = self.nonfinite = self.agreed = self.judged = 0
        self.max_abs = self._energy = self._noise = 0.0

    def add(self, expected: Array, got: Array) -> None:
        """Adds widened elements, at least one."""
        left, right, distance = _to_floats(expected, got)
        is_finite = np.isfinite(left) & np.isfinite(right)
        if not is_finite.all():
            same = (left == right) | (np.isnan(left) & np.isnan(right))
            self.nonfinite += int(np.count_nonzero(~is_finite & ~same))
            left, distance = (np.where(is_finite, values, 0.0) for values in (left, distance))
        self.elements += len(left)
        self.max_abs = max(self.max_abs, float(np.nan_to_num(distance.max())))
        with np.errstate(over="ignore", invalid="ignore"):
            self._energy += np.dot(left, left)
            self._noise += np.dot(distance, distance)

    def snr_db(self) -> float:
        if self._noise == 0:
            return SNR_CAP_DB
        # A sum of squares is beyond float64 for numbers above 1e154.
        if self._energy == 0 or not np.isfinite([self._energy, self._noise]).all():
            return -SNR_CAP_DB
        ratio = 10 * (np.log10(self._energy) - np.log10(self._noise))
        return float(np.clip(ratio, -SNR_CAP_DB, SNR_CAP_DB))


def _to_floats(expected: Array, got: Array) -> tuple[_Floats, _Floats, _Floats]:
    """Returns both as float64, and their absolute difference."""
    kind = expected.dtype.kind
    if kind in "iu":
        # In integers, where neighbours above 2 to the 53rd still differ; uint64 holds every difference.
        apart = np.where(got > expected, got - expected, expected - got).view(np.uint64)
        return expected.astype(np.float64), got.astype(np.float64), apart.astype(np.float64)
    if kind == "c":
        left, right = expected.view(np.float64), got.view(np.float64)
    elif kind in "US":
        left, right = np.ones(len(expected)), (expected == got).astype(np.float64)
    else:
        left, right = expected.astype(np.float64, copy=False), got.astype(np.float64, copy=False)
    # Infinity minus infinity is not read, and a difference beyond float64 is infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        return left, right, np.abs(right - left)


def _count_agreeing(expected: _Floats, got: _Floats) -> int:
    """Returns how many rows have a largest element of the reference where the candidate has its first one.

    NaN counts as the smallest.
    """
    left, right = (np.where(np.isnan(values), -np.inf, values) for values in (expected, got))
    chosen = np.take_along_axis(left, right.argmax(axis=1)[:, None], axis=1)[:, 0]
    return int(np.count_nonzero(chosen == left.max(axis=1)))


Gate = Mapping[str, Mapping[str, float]]
"""Bounds of figures of `OutputAccuracy`, by output and figure; "" for outputs without bounds of their own."""

_LABELS = {
    "max_abs": "largest absolute difference",
    "snr_db": "signal-to-noise ratio in dB",
    "top1": "top-1 agreement",
}


def find_gate_failures(gate: Gate, accuracies: Sequence[OutputAccuracy]) -> tuple[str, ...]:
    """Returns a line for each figure that misses its bound; none if the gate is passed.

    Without any output the gate is not passed. Outputs that could not be compared, and NaN or infinities that
    differ, always fail. A missing figure fails if its bound is set for that output, and passes if by default.
    """
    failures = tuple(line for accuracy in accuracies for line in _find_failures(gate, accuracy))
    return failures if accuracies else ("no output was compared",)


def _find_failures(gate: Gate, accuracy: OutputAccuracy) -> Iterator[str]:
    """Yields why an output fails a gate: bounds that it misses, or what cannot be compared."""
    subject = f"output {accuracy.output!r}"
    if accuracy.reason:
        yield f"{subject} cannot be compared: {accuracy.reason}"
        return
    if accuracy.nonfinite:
        yield f"{subject}: NaN or infinity differs in {accuracy.nonfinite} of {accuracy.elements} elements"
    own = gate.get(accuracy.output)
    for figure, bound in (gate.get("", {}) if own is None else own).items():
        label, value = _LABELS[figure], getattr(accuracy, figure)
        if value is None:
            if own is not None:
                yield f"{subject}: {label} is set, but no row of it has two elements or more"
        elif not (value <= bound if figure == "max_abs" else value >= bound):
            limit = "at most" if figure == "max_abs" else "at least"
            yield f"{subject}: {label} {value:.6g}, expected {limit} {bound:.12g}"
