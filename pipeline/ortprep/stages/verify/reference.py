"""The source's answers, and how far they are from its own optimised self: computed once for all variants.

A session on a large source takes minutes and twice the memory of its weights. So one variant's task runs it
and keeps the answers and samples for the tasks of the other variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from ortprep.bundle.atomic import write_json_atomic
from ortprep.bundle.codec import decode, encode, read_json
from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.manifest import OutputError
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import Answers
from ortprep.errors import PipelineError, SourceError, StageError, VerificationError
from ortprep.runtime.loading.session import CPU, default_plan
from ortprep.stages.core.accuracy import judge_accuracy
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId
from ortprep.stages.core.results import Graph, read_fetched
from ortprep.stages.core.sample_files import samples_key
from ortprep.stages.core.samples import Sample, calibrates, make_samples
from ortprep.stages.core.spec_fit import MIN_AUTO_SAMPLES
from ortprep.stages.verify.comparison import build_errors, judge, run_samples

SAMPLES_FOLDER = "samples"
ANSWERS_FOLDER = "reference"
_RECORD = "reference.json"


@dataclass(frozen=True)
class ReferenceAnswers:
    """Answers that every variant is compared with.

    Attributes:
        samples: The inputs; the first is of the primary shapes.
        noise: Distance of the fully optimised source on the CPU, per output; empty where it does not run.
    """

    samples: tuple[Sample, ...]
    answers: Answers
    noise: tuple[OutputError, ...]


def part_of(reference: ReferenceAnswers, chosen: Sequence[bool]) -> ReferenceAnswers:
    """Returns the chosen samples of a reference, and the answers to them."""
    answers = replace(reference.answers, samples=tuple(compress(reference.answers.samples, chosen)))
    return replace(reference, samples=tuple(compress(reference.samples, chosen)), answers=answers)


def held_out(reference: ReferenceAnswers) -> ReferenceAnswers:
    """Returns what judges a model that samples calibrated: the other half; all where there are no halves."""
    judging = [not calibrates(sample) for sample in reference.samples]
    real = sum(sample.real is not None for sample in reference.samples)
    return part_of(reference, judging) if len(set(judging)) == 2 and real >= MIN_AUTO_SAMPLES else reference


def judging(every: ReferenceAnswers, graph: Graph) -> ReferenceAnswers:
    """Returns what judges a graph: what did not calibrate it."""
    is_calibrated = graph.conversion is not None and graph.conversion.calibration is not None
    return held_out(every) if is_calibrated else every


def require_gate(
    context: Context, reference: ReferenceAnswers, answers: Answers, *, subject: str, hint: str
) -> tuple[OutputAccuracy, ...]:
    """Returns the accuracy of answers in another precision.

    Raises:
        VerificationError: They miss the spec's gate; the message begins with `subject` and ends in `hint`.
        SpecError: The user's metric does not work.
    """
    outputs, failures = judge_accuracy(
        context.spec,
        reference.samples,
        expected=reference.answers,
        got=answers,
    )
    if failures:
        lines = "\n".join(f"  {failure}" for failure in failures)
        what = f"{subject} misses its accuracy gate: {context.subject}"
        raise VerificationError(f"{what}\n{lines}", hint=hint)
    return outputs


def reference_variant(plan: Plan) -> str:
    """Returns the variant whose `verify` runs the source: one on the CPU, as the reference is."""
    return "cpu" if "cpu" in plan.targets else PORTABLE


def source_plan(context: Context) -> SessionPlan:
    """Returns the session that gives the reference."""
    return default_plan(str(read_fetched(context).path), CPU, level="ORT_DISABLE_ALL")


def make_reference(context: Context, scratch: Path) -> ReferenceAnswers:
    """Writes samples and the source's answers to them into the stage's folder.

    Raises:
        SpecError: The spec, or a sample of it, does not fit the model.
        SourceError: A sample changed since the key was computed.
        StageError: The source does not run on the CPU.
        OSError: The disk is full.
    """
    fetched = read_fetched(context).description
    context.folder.chmod(0o700)  # copies of real samples, and the answers to them, can be private
    samples = make_samples(context.spec, fetched.interface, context.folder / SAMPLES_FOLDER)
    if samples_key(context.spec) != context.key["samples"]:
        raise SourceError(
            f"samples changed while they were read: {context.spec.samples}", hint="run the command again"
        )
    context.say(f"source on CPU, {len(samples)} sample{'s' if len(samples) > 1 else ''}")
    plan = source_plan(context)
    try:
        answers = run_samples(context, plan, samples, context.folder / ANSWERS_FOLDER)
    except PipelineError as error:
        raise StageError(
            f"the source does not run on CPU: {context.subject}\n  {error.message}",
            hint=error.hint or "check it, or its samples, with plain ONNX Runtime on CPU",
        ) from error
    noise = _measure_noise(context, plan.model, samples, answers, scratch)
    reference = ReferenceAnswers(samples, answers, noise)
    write_reference(context.folder, reference)
    return reference


def _measure_noise(
    context: Context, model: str, samples: tuple[Sample, ...], answers: Answers, scratch: Path
) -> tuple[OutputError, ...]:
    """Compares the fully optimised source with the source itself; none if it does not run."""
    context.say("noise floor")
    tolerances = context.spec.verify.tolerances()
    try:
        optimised = run_samples(context, default_plan(model, CPU), samples, scratch / "noise")
        return build_errors(tuple(judge(tolerances, samples, expected=answers, got=optimised)))
    except PipelineError as error:
        context.say(f"no noise floor: {error.message}")
        return ()


def write_reference(folder: Path, reference: ReferenceAnswers) -> None:
    """Writes a record of a reference whose files are below `folder`.

    Raises:
        OSError: The disk is full.
    """
    root = folder.resolve()
    relative = _moved(reference, lambda file: Path(file).relative_to(root).as_posix())
    write_json_atomic(folder / _RECORD, encode(relative))


def read_reference(folder: Path) -> ReferenceAnswers:
    """Reads what `write_reference` wrote into a task's folder, wherever that is now.

    Raises:
        BundleError: It is not there, or damaged.
    """
    return _moved(decode(ReferenceAnswers, read_json(folder / _RECORD)), lambda file: str(folder / file))


def read_shared_reference(context: Context) -> ReferenceAnswers:
    """Returns the reference that the task of `reference_variant` left for those of the other variants."""
    return read_reference(context.upstream[TaskId("verify", reference_variant(context.plan))].folder)


def _moved(reference: ReferenceAnswers, move: Callable[[str], str]) -> ReferenceAnswers:
    """Returns the reference with other paths: a stage's folder gets its name when the stage is done."""
    answers = tuple(
        tuple(replace(answer, file=move(answer.file)) for answer in sample)
        for sample in reference.answers.samples
    )
    return replace(
        reference,
        samples=tuple(replace(sample, file=move(sample.file)) for sample in reference.samples),
        answers=replace(reference.answers, samples=answers),
    )
