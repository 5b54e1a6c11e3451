"""Answers of a session on disk: one child process, one file per output.

The child writes every output to a file of its own and drops it before the next sample runs; the caller maps
the files. So the outputs of two sessions can be compared without either process ever holding both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import StageError
from ortprep.runtime.loading.session import build_session, onnxruntime_errors
from ortprep.runtime.tensors.arrays import read_tensors, run_session
from ortprep.runtime.tensors.element_types import Array

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True)
class Answer:
    """One output of one sample, named as `run_session` names it, and the `.npy` file that holds it."""

    output: str
    file: str


@dataclass(frozen=True)
class Answers:
    """Inputs and outputs of a session, and its answers per sample; all in the session's order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    samples: tuple[tuple[Answer, ...], ...]


def write_answers(
    plan: SessionPlan, samples: Sequence[Path], folder: Path, *, timeout_s: float | None
) -> Answers:
    """Runs one session on every sample, in a fresh process, and writes what it answers.

    Args:
        plan: Recipe of the session.
        samples: `.npz` files of arrays by input name; others in them are left out.
        folder: Folder for `SAMPLE/OUTPUT.npy`, both counted from 0.
        timeout_s: Seconds for all of it; None waits for ever.

    Raises:
        LoadError: The session cannot be made.
        BundleError: A sample cannot be read.
        StageError: A run failed.
        OSError: There is no room for its outputs.
        ChildError: The process died, or its deadline passed.
    """
    request = plan, tuple(sample.resolve() for sample in samples), folder.resolve()
    return run_child(run_samples, request, timeout_s=timeout_s).value


def read_answer(answer: Answer) -> Array:
    """Maps one output's file, to be read when it is looked at; raises `StageError` if it is damaged."""
    try:
        array: Array = np.load(answer.file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise StageError(f"cannot read output {answer.output!r}: {answer.file}\n  {error}") from error
    return array


def run_samples(request: tuple[SessionPlan, tuple[Path, ...], Path]) -> Answers:
    """Child function of `write_answers`, which has its errors: the plan, the samples and the folder."""
    plan, samples, folder = request
    session = build_session(plan)
    return Answers(
        inputs=describe_tensors(session.get_inputs()),
        outputs=describe_tensors(session.get_outputs()),
        samples=tuple(
            _answer(session, plan.model, sample, folder=folder / str(position))
            for position, sample in enumerate(samples)
        ),
    )


def _answer(
    session: onnxruntime.InferenceSession, model: str, sample: Path, *, folder: Path
) -> tuple[Answer, ...]:
    """Runs a session on one sample and writes its outputs."""
    names = {one.name for one in session.get_inputs()}
    feeds = {name: array for name, array in read_tensors(sample).items() if name in names}
    try:
        outputs = run_session(session, feeds)
    except onnxruntime_errors() as error:
        raise StageError(
            f"ONNX Runtime cannot run {model}\n"
            f"  with {describe_shapes(feeds)}: {type(error).__name__}: {error}"
        ) from error
    return _write_outputs(outputs, folder)


def _write_outputs(outputs: dict[str, Array], folder: Path) -> tuple[Answer, ...]:
    """Writes each output to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for position, name in enumerate(tuple(outputs)):
        file = folder / f"{position}.npy"
        # Popped, so that each is freed as soon as it is written.
        _save(file, outputs.pop(name))
        written.append(Answer(name, str(file)))
    return tuple(written)


def _save(file: Path, array: Array) -> None:
    with file.open("wb") as stream:
        # Reserved before, since numpy reports how much it could not write, but not why.
        os.posix_fallocate(stream.fileno(), 0, max(1, array.nbytes))
        np.save(stream, array, allow_pickle=False)


def describe_tensors(values: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Returns a session's inputs or outputs as bundles describe tensors; others keep their types."""
    described = []
    for one in values:
        inner = one.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64"}.get(inner, inner)
        name = dtype if one.type.startswith("tensor(") else one.type
        described.append(TensorSpec(one.name, name, tuple(one.shape or ())))
    return tuple(described)


def describe_shapes(feeds: Mapping[str, Array]) -> str:
    """Returns the shapes of inputs as records and messages write them: `name=[…]` joined by spaces."""
    return " ".join(f"{name}={list(array.shape)}" for name, array in feeds.items()) or "no inputs"
