"""Is a converted model accurate enough? Figures and bounds in, a verdict and its reasons out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.bundle.conversion_record import OutputAccuracy


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
    """What every output has to meet.

    Attributes:
        default: Bounds of every output that `outputs` does not name.
        outputs: Bounds by output name. The tensors of a sequence or map, `NAME[…]`, take those of `NAME`
            unless they are named themselves.
    """

    default: Thresholds = Thresholds()
    outputs: Mapping[str, Thresholds] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether a gate is passed.

    Attributes:
        ok: Whether it is.
        failures: A line for everything that is not as it should be.
    """

    ok: bool
    failures: tuple[str, ...] = ()


def judge(gate: Gate, accuracies: Sequence[OutputAccuracy]) -> Verdict:
    """Compares the figures of all outputs with their bounds.

    Outputs that could not be compared, and NaN or infinities that differ, fail whatever the bounds are. So
    does an output that the gate names and nobody compared: a bound that is never looked at holds nothing. A
    figure that an output does not have fails if its bound is set for that output, and not if by default.

    Args:
        gate: The bounds.
        accuracies: The figures; without any, nothing was shown, and the gate is not passed.
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
    return Verdict(not failures, tuple(failures))


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
            shown, wanted = _tell_apart(value, bound)
            yield f"{subject}: {label} {shown}, expected {limit} {wanted}"


def _name_in(gate: Gate, output: str) -> str | None:
    """Returns the name by which a gate has an output, or the sequence or map that it is of."""
    if output in gate.outputs or not output.endswith("]"):
        return output if output in gate.outputs else None
    # Keys of a map may hold brackets themselves, and so may names.
    wholes = (output[:end] for end in range(len(output) - 1, 0, -1) if output[end] == "[")
    return next((whole for whole in wholes if whole in gate.outputs), None)


def _tell_apart(value: float, bound: float) -> tuple[str, str]:
    """Returns both with as few digits, three at least, as show that they differ."""
    texts = ((f"{value:.{digits}g}", f"{bound:.{digits}g}") for digits in range(3, 18))
    return next((pair for pair in texts if float(pair[0]) != float(pair[1])), (repr(value), repr(bound)))
