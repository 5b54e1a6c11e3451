"""The golden sample of a bundle: the smallest drawn input, and the answers to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import Answer, Answers, read_answer
from ortprep.errors import PipelineError, SpecError
from ortprep.runtime.loading.golden import INPUT, LAYOUT, OUTPUT, PART
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.stages.core.contract import Context
from ortprep.stages.core.results import read_fetched
from ortprep.stages.core.samples import Sample, draw_sample
from ortprep.stages.verify.comparison import run_samples

GOLDEN_FILE = "golden.npz"

OWN_GOLDEN_FILE = "own_golden.npz"
"""Of a variant in a precision of its own: a sample with its own answers."""

MAX_GOLDEN_BYTES = 2**20
"""Size of the largest golden sample, unless its inputs, which are kept whole, are larger by themselves:
every load that checks answers reads it."""

MIN_OUTPUT_BYTES = 2**18
"""What outputs may take in any case."""


def keep_golden(
    context: Context,
    name: str,
    samples: Sequence[Sample],
    answers: Answers,
    *,
    plan: SessionPlan,
    scratch: Path,
) -> None:
    """Writes the smallest drawn sample and its answers into the task's folder.

    Real samples can be private, and the golden sample is part of the bundle. So one is drawn where all are
    real; a real one is never taken.

    Args:
        context: The task.
        name: Name of the file.
        samples: What was run.
        answers: The answers to it.
        plan: The session that answers a drawn sample.
        scratch: A folder to be, for a drawn sample.

    Raises:
        SpecError: All samples are real, and a drawn one does not run.
        StageError: An output cannot be read.
        BundleError: The sample cannot be read.
        OSError: The file cannot be written.
    """
    every = list(zip(samples, answers.samples, strict=True))
    suitable = [(sample, answer) for sample, answer in every if sample.real is None]
    suitable = suitable or [_answer_drawn(context, plan, scratch)]
    chosen, answer = min(suitable, key=lambda pair: pair[0].elements)
    sample = chosen.path
    write_golden(context.folder / name, sample=sample, answers=answer)
    if sample.stat().st_size > MAX_GOLDEN_BYTES:
        context.say(
            f"golden sample with inputs of {sample.stat().st_size // 2**20} MB, since no declared shape is "
            "smaller; every load that checks answers reads it"
        )


def _answer_drawn(context: Context, plan: SessionPlan, scratch: Path) -> tuple[Sample, tuple[Answer, ...]]:
    """Returns a drawn sample, and what a session answers to it.

    Raises:
        SpecError: The sample does not run.
    """
    scratch.mkdir()
    try:
        sample = draw_sample(
            context.spec, read_fetched(context).description.interface, scratch / "sample.npz"
        )
        return sample, run_samples(context, plan, [sample], scratch / "answers").samples[0]
    except PipelineError as error:
        got = error.message.splitlines()[0]
        raise SpecError(
            f"no golden sample: {context.subject}\n"
            f"  expected a drawn input that the model runs on, since a bundle gets no real ones, got {got}",
            hint="declare inputs: {NAME: {shapes: [[…]], range: [0, 1]}}, or values, in the spec",
        ) from None


def write_golden(path: Path, *, sample: Path, answers: Sequence[Answer]) -> None:
    """Writes a sample and the recorded answers to it, as `ortprep.runtime.loading.golden` reads them.

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
