"""Is a converted model accurate enough? Figures and bounds in, failures out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ortprep.bundle.conversion_record import OutputAccuracy


@dataclass(frozen=True)
class Thresholds:
    """Bounds of an output's figures, as `OutputAccuracy` defines them; None where there is none.

    Attributes:
        max_abs: Largest absolute difference at most.
        mean_abs: Mean absolute difference at most.
        cosine: Cosine at least, in the worst sample.
        snr_db: Signal-to-noise ratio at least, in dB, in the worst sample.
        top1: Share of rows that rank the same element first, or of equal elements, at least.
    """

    max_abs: float | None = None
    mean_abs: float | None = None
    cosine: float | None = None
    snr_db: float | None = None
    top1: float | None = None


_UPPER_BOUNDS = frozenset({"max_abs", "mean_abs"})
_LABELS = {
    "max_abs": "largest absolute difference",
    "mean_abs": "mean absolute difference",
    "cosine": "cosine",
    "snr_db": "signal-to-noise ratio in dB",
    "top1": "top-1 agreement",
}


@dataclass(frozen=True)
class Gate:
    """Bounds of every output.

    Attributes:
        default: Bounds of every output that `outputs` does not name.
        outputs: Bounds by output name. Tensors of a sequence or map, `NAME[…]`, fall back to `NAME`.
    """

    default: Thresholds = Thresholds()
    outputs: Mapping[str, Thresholds] = field(default_factory=dict)


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
        for name in gate.outputs
        if name not in met
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
    bounds = gate.default if name is None else gate.outputs[name]
    for figure, label in _LABELS.items():
        bound, value = getattr(bounds, figure), getattr(accuracy, figure)
        if bound is None:
            continue
        if value is None:
            if name is not None:
                yield f"{subject}: {label} is set, but no row of it has two elements or more"
        elif not (value <= bound if figure in _UPPER_BOUNDS else value >= bound):
            limit = "at most" if figure in _UPPER_BOUNDS else "at least"
            yield f"{subject}: {label} {value:.6g}, expected {limit} {bound:.12g}"


def _name_in(gate: Gate, output: str) -> str | None:
    """Returns the name by which a gate has an output, or the sequence or map that it is of."""
    if output in gate.outputs or not output.endswith("]"):
        return output if output in gate.outputs else None
    # Keys of a map may hold brackets themselves, and so may names.
    wholes = (output[:end] for end in range(len(output) - 1, 0, -1) if output[end] == "[")
    return next((whole for whole in wholes if whole in gate.outputs), None)
