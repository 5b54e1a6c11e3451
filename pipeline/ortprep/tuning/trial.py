"""One trial: a plan in a fresh process, through the runtime probe, and its answers compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ortprep.bundle.codec import decode
from ortprep.bundle.loader_config import Tolerance
from ortprep.children.answers import Answer, read_answer
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.errors import VerificationError
from ortprep.measuring.accuracy import Gate, compare_answers, find_gate_failures
from ortprep.runtime.tensors.element_types import Array


@dataclass(frozen=True)
class TrialRequest(ProbeRequest):
    """A plan to measure on several samples, and the answers to compare with.

    Attributes:
        answers: The source's, per sample: the first to `sample`, then those to `more_samples`.
        tolerances: By output name; "" for those it does not name.
        gate: Judges the answers of a converted model, in place of tolerances.
    """

    answers: tuple[tuple[Answer, ...], ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    gate: Gate | None = None


def measure_trial(request: TrialRequest, *, timeout_s: float, memory_bytes: int | None) -> ProbeResult:
    """Measures a plan once, in a process of its own, with at most `memory_bytes` of private memory.

    Raises:
        VerificationError: An answer is outside its tolerance.
        LoadError: The session could not be created.
        ChildError: The process died, hung, or ran out of memory.
    """
    result = measure_plan(request, timeout_s=timeout_s, memory_bytes=memory_bytes, function=measure_and_check)
    return replace(result, steady_ms=fmean((result.steady_ms, *result.more_steady_ms)))


def measure_and_check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `measure_trial`: measures, then runs every sample once more and compares the answers.

    Args:
        request: The fields of a `TrialRequest`, and `gpu`.

    Raises:
        VerificationError: An answer is outside its tolerance.
        PipelineError: The session could not answer.
    """
    from ortprep.children.probe_process import measure_runs

    figures, runs = measure_runs(request)
    expected = decode(tuple[tuple[Answer, ...], ...], request["answers"])
    tolerances = decode(Mapping[str, Tolerance], request["tolerances"])  # type: ignore[type-abstract]
    answers = [run.answer() for run in runs]
    if request["gate"] is not None:
        accuracies = compare_answers(expected, answers)
        if failures := find_gate_failures(request["gate"], accuracies):
            lines = "\n  ".join(failures)
            raise VerificationError(f"misses its accuracy gate\n  {lines}")
        return figures
    for known, outputs in zip(expected, answers, strict=True):
        _check_answers(outputs, known, tolerances)
    return figures


def _check_answers(
    outputs: Mapping[str, Array], expected: Sequence[Answer], tolerances: Mapping[str, Tolerance]
) -> None:
    """Raises VerificationError for an answer to one sample that is outside its tolerance."""
    from ortprep.runtime.tensors.compare import compare_output

    for answer in expected:
        if answer.output not in outputs:
            raise VerificationError(f"does not return output {answer.output!r}")
        tolerance = tolerances.get(answer.output, tolerances[""])
        found = compare_output(read_answer(answer), outputs[answer.output], tolerance, name=answer.output)
        if not found.ok:
            raise VerificationError(
                f"wrong answer: output {answer.output!r}, {found.reason}\n"
                f"  expected {found.expected} at {list(found.worst_index)}, got {found.got}"
            )
