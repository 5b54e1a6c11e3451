"""What sessions answer to the same samples, asked one after another and compared output by output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.bundle.session_record import SessionPlan
from pipeline.errors import ChildTimeoutError, ResourceError, VerificationError
from pipeline.runtime.answers import Answers, read_answer, write_answers
from pipeline.runtime.compare import compare_output
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import Context
from pipeline.stages.inputs.samples import Sample
from pipeline.stages.verify.verdict import Judged, tolerance_of


def ask(context: Context, plan: SessionPlan, samples: Sequence[Sample], folder: Path) -> Answers:
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
        VerificationError: One side has other outputs than the other.
        StageError: An answer's file is gone or damaged.
    """
    for sample, left, right in zip(samples, expected.samples, got.samples, strict=True):
        names = [[answer.output for answer in side] for side in (left, right)]
        if names[0] != names[1]:
            raise VerificationError(
                f"other outputs than the source's: {spec.name}, sample {sample.shapes}\n"
                f"  expected {', '.join(names[0])}, got {', '.join(names[1])}"
            )
        for reference, candidate in zip(left, right, strict=True):
            name = reference.output
            tolerance = tolerance_of(spec.verify, name)
            comparison = compare_output(read_answer(reference), read_answer(candidate), tolerance, name=name)
            yield Judged(sample.shapes, tolerance, comparison)


def describe(context: Context) -> str:
    """Returns what is verified, for messages: `NAME/VARIANT`."""
    return f"{context.spec.name}/{context.variant}"
