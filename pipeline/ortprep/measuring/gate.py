"""Is a converted model accurate enough? Figures and bounds in, failures out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ortprep.bundle.conversion_record import OutputAccuracy

Gate = Mapping[str, Mapping[str, float]]
"""Bounds of figures of `OutputAccuracy`, by output and figure; "" for outputs without bounds of their own.

Tensors of a sequence or map, `NAME[…]`, have the bounds of `NAME` if they have none.
"""

_UPPER_BOUNDS = frozenset({"max_abs", "mean_abs"})
_LABELS = {
    "max_abs": "largest absolute difference",
    "mean_abs": "mean absolute difference",
    "cosine": "cosine",
    "snr_db": "signal-to-noise ratio in dB",
    "top1": "top-1 agreement",
}


def find_gate_failures(gate: Gate, accuracies: Sequence[OutputAccuracy]) -> tuple[str, ...]:
    """Returns a line for each figure that misses its bound; none if the gate is passed.

    Without any output the gate is not passed. Outputs that could not be compared, and NaN or infinities that
    differ, always fail. So does a named output that was not compared. A missing figure fails if its bound is
    set for that output, and passes if by default.
    """
    failures = [line for accuracy in accuracies for line in _find_failures(gate, accuracy)]
    if not accuracies:
        failures.append("no output was compared")
    met = {_name_in(gate, accuracy.output) for accuracy in accuracies}
    outputs = ", ".join(repr(accuracy.output) for accuracy in accuracies) or "none"
    failures += [
        f"output {name!r} has thresholds and was not compared, expected one of: {outputs}"
        for name in gate
        if name and name not in met
    ]
    return tuple(failures)


def _find_failures(gate: Gate, accuracy: OutputAccuracy) -> Iterator[str]:
    subject = f"output {accuracy.output!r}"
    if accuracy.reason:
        yield f"{subject} cannot be compared: {accuracy.reason}"
        return
    if accuracy.nonfinite:
        yield f"{subject}: NaN or infinity differs in {accuracy.nonfinite} of {accuracy.elements} elements"
    name = _name_in(gate, accuracy.output)
    for figure, bound in gate.get(name or "", {}).items():
        label, value = _LABELS[figure], getattr(accuracy, figure)
        if value is None:
            if name is not None:
                yield f"{subject}: {label} is set, but no row of it has two elements or more"
        elif not (value <= bound if figure in _UPPER_BOUNDS else value >= bound):
            limit = "at most" if figure in _UPPER_BOUNDS else "at least"
            yield f"{subject}: {label} {value:.6g}, expected {limit} {bound:.12g}"


def _name_in(gate: Gate, output: str) -> str | None:
    """Returns the name by which a gate has an output, or the sequence or map that it is of."""
    if output in gate or not output.endswith("]"):
        return output if output in gate else None
    # Keys of a map may hold brackets themselves, and so may names.
    wholes = (output[:end] for end in range(len(output) - 1, 0, -1) if output[end] == "[")
    return next((whole for whole in wholes if whole in gate), None)
