"""The source's answers, and how far they are from its own optimised self: computed once for all variants.

A session on a large source takes minutes and twice the memory of its weights. So one variant's task runs it
and keeps the answers and samples for the tasks of the other variants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np

from ortprep.bundle.atomic import write_json_atomic
from ortprep.bundle.codec import decode, encode, read_json
from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.manifest import OutputError
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import Answer, Answers, read_answer
from ortprep.errors import PipelineError, SpecError, StageError, VerificationError
from ortprep.runtime.loading.session import CPU, default_plan
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.runtime.verification.golden import INPUT, LAYOUT, OUTPUT, PART
from ortprep.stages.core.accuracy import judge_accuracy
from ortprep.stages.core.contract import PORTABLE, Context, Plan
from ortprep.stages.core.inputs.sample_files import fits_interface
from ortprep.stages.core.inputs.samples import Sample, make_samples
from ortprep.stages.core.results import read_fetched
from ortprep.stages.verify.comparison import build_errors, describe, judge, run_samples

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


def fitting(reference: ReferenceAnswers, interface: ModelInterface, subject: str) -> ReferenceAnswers:
    """Returns the part of a reference whose inputs a model takes: one that is bound takes no other shapes.

    Raises:
        StageError: There is no such sample.
    """
    fits = [fits_interface(sample.path, interface) for sample in reference.samples]
    if all(fits):
        return reference
    if not any(fits):
        shapes = "; ".join(dict.fromkeys(sample.shapes for sample in reference.samples))
        expected = ", ".join(f"{item.name} {list(item.shape or ())}" for item in interface.inputs)
        raise StageError(
            f"no sample to run it with: {subject}\n  expected a sample with {expected}, got {shapes}",
            hint="declare the bound shapes too: inputs: {NAME: {shapes: [[…]]}} in the spec",
        )
    return part_of(reference, fits)


def part_of(reference: ReferenceAnswers, chosen: Sequence[bool]) -> ReferenceAnswers:
    """Returns the chosen samples of a reference, and the answers to them."""
    answers = replace(reference.answers, samples=tuple(compress(reference.answers.samples, chosen)))
    return replace(reference, samples=tuple(compress(reference.samples, chosen)), answers=answers)


def require_gate(
    context: Context, reference: ReferenceAnswers, answers: Answers, *, subject: str, hint: str
) -> tuple[OutputAccuracy, ...]:
    """Returns the accuracy of answers in another precision.

    Raises:
        VerificationError: They miss the spec's gate; the message begins with `subject` and ends in `hint`.
        SpecError: The user's metric does not work.
    """
    judgement = judge_accuracy(
        context.spec,
        reference.samples,
        expected=reference.answers,
        got=answers,
        # A bucket computes what its parent does, which was judged on all samples.
        of_all=not context.variant_plan.is_bucket,
    )
    if judgement.failures:
        lines = "\n".join(f"  {failure}" for failure in judgement.failures)
        what = f"{subject} misses its accuracy gate: {describe(context)}"
        raise VerificationError(f"{what}\n{lines}", hint=hint)
    return judgement.outputs


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
        StageError: The source does not run on the CPU.
        OSError: The disk is full.
    """
    fetched = read_fetched(context).description
    context.folder.chmod(0o700)  # copies of real samples, and the answers to them, can be private
    samples = make_samples(context.spec, fetched.interface, context.folder / SAMPLES_FOLDER)
    context.say(f"source on CPU, {len(samples)} sample{'s' if len(samples) > 1 else ''}")
    plan = source_plan(context)
    try:
        answers = run_samples(context, plan, samples, context.folder / ANSWERS_FOLDER)
    except PipelineError as error:
        raise StageError(
            f"the source does not run on CPU: {describe(context)}\n  {error.message}",
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


GOLDEN_FILE = "golden.npz"

OWN_GOLDEN_FILE = "own_golden.npz"
"""Of a converted variant: a sample that it takes, with its own answers if it has a precision of its own."""

DrawnAnswers = Callable[[], tuple[Sample, tuple[Answer, ...]] | None]

MAX_GOLDEN_BYTES = 2**20
"""Size of the largest golden sample, unless its inputs, which are kept whole, are larger by themselves:
every load that checks answers reads it."""

MIN_OUTPUT_BYTES = 2**18
"""What outputs may take in any case."""


def keep_golden(
    context: Context, name: str, samples: Sequence[Sample], answers: Answers, drawn: DrawnAnswers
) -> None:
    """Writes the smallest drawn sample and its answers into the task's folder.

    Real samples can be private, and the golden sample is part of the bundle. So one is drawn where all are
    real; a real one is never taken.

    Args:
        context: The task.
        name: Name of the file.
        samples: What was run.
        answers: The answers to it.
        drawn: Draws a sample and runs it; None if that is not possible.

    Raises:
        SpecError: All samples are real, and no drawn one runs.
        StageError: An output cannot be read.
        BundleError: The sample cannot be read.
        OSError: The file cannot be written.
    """
    every = list(zip(samples, answers.samples, strict=True))
    suitable = [(sample, answer) for sample, answer in every if sample.real is None]
    if not suitable:
        own = drawn()
        if own is None:
            raise SpecError(
                f"no golden sample: {context.spec.name}/{context.variant}\n"
                "  expected a drawn input that the model runs on, since a bundle gets no real ones, got none",
                hint="declare inputs: {NAME: {shapes: [[…]], range: [0, 1]}}, or values, in the spec",
            )
        suitable = [own]
    chosen, answer = min(suitable, key=lambda pair: pair[0].elements)
    sample = chosen.path
    write_golden(context.folder / name, sample=sample, answers=answer)
    if sample.stat().st_size > MAX_GOLDEN_BYTES:
        context.say(
            f"golden sample with inputs of {sample.stat().st_size // 2**20} MB, since no declared shape is "
            "smaller; every load that checks answers reads it"
        )


def write_golden(path: Path, *, sample: Path, answers: Sequence[Answer]) -> None:
    """Writes a sample and the recorded answers to it, as `ortprep.runtime.verification.golden` reads them.

    Every output is there, each with an equal share of the room: whole if it fits, else every k-th element.
    Large outputs are never in memory.

    Args:
        path: The new `.npz` file; equal arrays give equal bytes.
        sample: `.npz` of arrays by input name.
        answers: The outputs, in the model's order.

    Raises:
        StageError: An output cannot be read.
        BundleError: The sample cannot be read.
        OSError: The file cannot be written.
    """
    arrays = {f"{INPUT}{name}": array for name, array in read_tensors(sample).items()}
    room_bytes = max(MAX_GOLDEN_BYTES - sample.stat().st_size, MIN_OUTPUT_BYTES)
    share_bytes = room_bytes // max(1, len(answers))
    for answer in answers:
        array = read_answer(answer)
        if array.nbytes <= share_bytes:
            arrays[f"{OUTPUT}{answer.output}"] = array
            continue
        step = -(-array.size // max(1, share_bytes // array.itemsize))
        while math.gcd(step, array.size) > 1:  # else the elements could be all of one column
            step += 1
        arrays[f"{PART}{answer.output}"] = array.reshape(-1)[::step]
        arrays[f"{LAYOUT}{answer.output}"] = np.array([step, *array.shape], np.int64)
    write_tensors(path, arrays)
