"""How far a converted model's outputs are from its source's.

Arrays may be memory maps of any size: they are read in blocks, and computed in float64. Floats of any width
are compared with each other, since a conversion may narrow an output; other types must be equal.

- Signal-to-noise ratio: `10 · log10(Σ expected² / Σ (expected − got)²)` in dB, between −200 and 200.
- Cosine of the angle between the arrays as vectors; 1 for two zero vectors, 0 if one of them is zero.
- Both are those of the worst sample: no average hides it.
- Top-1, of floats: the share of rows along the last axis whose largest element in the candidate (the first
  of equal ones) is a largest of the reference; NaN counts as the smallest. Of integers, booleans and
  strings: the share of equal elements. Over all samples; None where no row has two elements.
- A NaN or an infinity that only one side has is counted, and has no difference.
- A boolean counts as 0 or 1, a complex number as two elements without a rank; a string as 1, and a different
  string as 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.runtime.tensors.element_types import Array, dtype_name, element_type_of, widen
from ortprep.runtime.verification.answers import Answer, read_answer
from ortprep.runtime.verification.compare import BLOCK_ELEMENTS, read_block

SNR_CAP_DB = 200.0
"""Signal-to-noise ratio of equal arrays; float64 itself has about 310 dB."""

_Floats: TypeAlias = NDArray[np.float64]

_SAFE_EXPONENT = 400
"""Squares of numbers between 2 to minus this power and 2 to this power stay in the range of float64."""


class AccuracyMeter:
    """Compares one output, sample by sample."""

    def __init__(self, output: str, *, block_elements: int = BLOCK_ELEMENTS) -> None:
        self._output, self._block_elements = output, block_elements
        self._reason = ""
        self._samples: list[_Tally] = []

    def add(self, expected: Array, got: Array) -> None:
        """Compares one sample's arrays; arrays that cannot be compared set the `reason`."""
        mismatch = _compare_form(expected, got)
        if mismatch:
            self.refuse(mismatch)
        else:
            self._samples.append(_compare(expected, got, self._block_elements))

    def refuse(self, reason: str) -> None:
        """Records why a sample cannot be compared; the first reason is reported."""
        self._reason = self._reason or reason

    def result(self) -> OutputAccuracy:
        """Returns the figures of what was added so far."""
        samples = [sample for sample in self._samples if sample.elements]
        elements = sum(sample.elements for sample in samples)
        judged = sum(sample.judged for sample in samples)
        total = sum((sample.sum_abs for sample in samples), start=np.longdouble(0))
        return OutputAccuracy(
            self._output,
            elements=elements,
            max_abs=max((sample.max_abs for sample in samples), default=0.0),
            mean_abs=_to_finite(total / max(elements, 1)),
            cosine=min((sample.cosine() for sample in samples), default=1.0),
            snr_db=min((sample.snr_db() for sample in samples), default=SNR_CAP_DB),
            top1=sum(sample.agreed for sample in samples) / judged if judged else None,
            nonfinite=sum(sample.nonfinite for sample in samples),
            reason=self._reason,
        )


def compare_answers(
    expected: Sequence[Sequence[Answer]], got: Sequence[Sequence[Answer]]
) -> tuple[OutputAccuracy, ...]:
    """Returns the accuracy of every output, in the source's order; samples in the same order on both sides.

    Raises:
        StageError: An answer's file is missing or damaged.
    """
    meters: dict[str, AccuracyMeter] = {}
    for left, right in zip(expected, got, strict=True):
        candidates = {answer.output: answer for answer in right}
        for reference in left:
            meter = meters.setdefault(reference.output, AccuracyMeter(reference.output))
            candidate = candidates.pop(reference.output, None)
            if candidate is None:
                meter.refuse("the converted model did not give it")
            else:
                meter.add(read_answer(reference), read_answer(candidate))
        for name in candidates:
            meters.setdefault(name, AccuracyMeter(name)).refuse("the source did not give it")
    return tuple(meter.result() for meter in meters.values())


def _compare_form(expected: Array, got: Array) -> str:
    types = dtype_name(expected.dtype), dtype_name(got.dtype)
    if types[0] != types[1] and not (_is_float(expected) and _is_float(got)):
        return f"element type: expected {types[0]}, got {types[1]}"
    if expected.shape != got.shape:
        return f"shape: expected {list(expected.shape)}, got {list(got.shape)}"
    return ""


def _is_float(array: Array) -> bool:
    kind = element_type_of(array.dtype)
    return array.dtype.kind == "f" if kind is None else not kind.is_integer


def _compare(expected: Array, got: Array, block_elements: int) -> _Tally:
    row = expected.shape[-1] if _is_float(expected) and expected.ndim else 0
    tally, ranking = _Tally(), RowRanking(row)
    for start, stop in _spans(expected.size, row, block_elements):
        left, right = widen(read_block(expected, start, stop)), widen(read_block(got, start, stop))
        if row > 1:
            ranking.add(left, right, ends_row=stop % row == 0)
        elif left.dtype.kind not in "fc":
            tally.agreed += int(np.count_nonzero(left == right))
            tally.judged += len(left)
        _add_block(tally, left, right)
    tally.agreed += ranking.agreed
    tally.judged += ranking.rows
    return tally


def _spans(size: int, row: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Yields where blocks begin and end: each is whole rows or, of a row longer than a block, a part."""
    if row <= block_elements:
        step = max(block_elements // max(row, 1) * max(row, 1), 1)
        yield from ((start, min(start + step, size)) for start in range(0, size, step))
        return
    for first in range(0, size, row):
        end = first + row
        yield from ((start, min(start + block_elements, end)) for start in range(first, end, block_elements))


class _Tally:
    """The sums over one sample. Wider than float64, so that no square leaves their range."""

    def __init__(self) -> None:
        self.elements = self.nonfinite = self.agreed = self.judged = 0
        self.max_abs = 0.0
        self.sum_abs = self.energy = self.got_energy = self.product = self.noise = np.longdouble(0)

    def cosine(self) -> float:
        if self.noise == 0:
            return 1.0
        if self.energy == 0 or self.got_energy == 0:
            return 0.0
        cosine = self.product / (np.sqrt(self.energy) * np.sqrt(self.got_energy))
        return float(np.clip(cosine, -1, 1))

    def snr_db(self) -> float:
        if self.noise == 0 or self.energy == 0:
            return SNR_CAP_DB if self.noise == 0 else -SNR_CAP_DB
        ratio = 10 * (np.log10(self.energy) - np.log10(self.noise))
        return float(np.clip(ratio, -SNR_CAP_DB, SNR_CAP_DB))


def _add_block(tally: _Tally, expected: Array, got: Array) -> None:
    """Adds widened elements, at least one, to a sample's sums."""
    left, right, distance, unit = _to_floats(expected, got)
    is_finite = np.isfinite(left) & np.isfinite(right)
    if not is_finite.all():
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        tally.nonfinite += int(np.count_nonzero(~is_finite & ~same))
        left, right, distance = (np.where(is_finite, values, 0.0) for values in (left, right, distance))
    tally.elements += len(left)
    tally.max_abs = max(tally.max_abs, _to_finite(distance.max() * unit))
    tally.sum_abs += np.longdouble(distance.sum()) * unit
    square = unit * unit
    tally.energy += np.dot(left, left) * square
    tally.got_energy += np.dot(right, right) * square
    tally.product += np.dot(left, right) * square
    tally.noise += np.dot(distance, distance) * square


def _to_floats(expected: Array, got: Array) -> tuple[_Floats, _Floats, _Floats, np.longdouble]:
    """Returns both as float64, their absolute difference, and the unit that all three are in."""
    unit = np.longdouble(1)
    kind = expected.dtype.kind
    if kind in "iu":
        # In integers, where neighbours above 2 to the 53rd still differ; uint64 holds every difference.
        apart = np.where(got > expected, got - expected, expected - got).view(np.uint64)
        return expected.astype(np.float64), got.astype(np.float64), apart.astype(np.float64), unit
    if kind == "c":
        left, right = expected.view(np.float64), got.view(np.float64)
    elif kind in "US":
        left, right = np.ones(len(expected)), (expected == got).astype(np.float64)
    else:
        left, right = expected.astype(np.float64, copy=False), got.astype(np.float64, copy=False)
    exponent = int(np.frexp(max(_largest(left), _largest(right)))[1])
    if abs(exponent) > _SAFE_EXPONENT:
        left, right = np.ldexp(left, -exponent), np.ldexp(right, -exponent)
        unit = np.ldexp(unit, exponent)
    with np.errstate(invalid="ignore"):  # infinity minus infinity, which nobody reads
        return left, right, np.abs(right - left), unit


def _largest(values: _Floats) -> float:
    """Returns the largest finite magnitude; 0 without any."""
    magnitudes = np.abs(values)
    if not math.isfinite(magnitudes.max()):
        magnitudes = magnitudes[np.isfinite(magnitudes)]
    return float(np.max(magnitudes, initial=0.0))


def _to_finite(value: np.longdouble) -> float:
    return float(min(value, np.longdouble(sys.float_info.max)))


class _Ranks(NamedTuple):
    """Of every row: the reference's largest, the candidate's, and what the reference has where that is."""

    largest: _Floats
    highest: _Floats
    chosen: _Floats


class RowRanking:
    """Counts rows whose first element in the candidate is a largest of the reference.

    Of equal elements the candidate's first one counts; NaN counts as the smallest.
    """

    def __init__(self, row: int) -> None:
        self._row = row
        self._begun: _Ranks | None = None
        self.rows = self.agreed = 0

    def add(self, expected: _Floats, got: _Floats, *, ends_row: bool) -> None:
        """Adds a block: one or more whole rows, or the next part of one that is longer."""
        width = min(self._row, len(expected))
        ranks = _rank(expected.reshape(-1, width), got.reshape(-1, width))
        if self._begun is not None:
            ranks = _join(self._begun, ranks)
        self._begun = None if ends_row else ranks
        if ends_row:
            self.rows += len(ranks.largest)
            self.agreed += int(np.count_nonzero(ranks.chosen == ranks.largest))


def _rank(expected: _Floats, got: _Floats) -> _Ranks:
    left, right = (np.where(np.isnan(values), -np.inf, values) for values in (expected, got))
    first = right.argmax(axis=1)[:, None]
    highest, chosen = (np.take_along_axis(values, first, axis=1)[:, 0] for values in (right, left))
    return _Ranks(left.max(axis=1), highest, chosen)


def _join(before: _Ranks, after: _Ranks) -> _Ranks:
    """Returns the ranks of rows whose two parts were ranked."""
    chosen = np.where(after.highest > before.highest, after.chosen, before.chosen)
    largest, highest = (np.maximum(x, y) for x, y in zip(before[:2], after[:2], strict=True))
    return _Ranks(largest, highest, chosen)
