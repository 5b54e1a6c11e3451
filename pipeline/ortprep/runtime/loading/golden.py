"""The golden sample: does a session give the answers that were recorded when its bundle was made?

Of a large output a part is recorded: the elements at the positions 0, step, 2 · step, … in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.loader_config import MAX_RANK, Golden, LoaderConfig, Variant, golden_of
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import BundleError, LoadError
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import onnxruntime_errors
from ortprep.runtime.tensors.element_types import is_bounded_shape

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.tensors.element_types import Array

INPUT, OUTPUT, PART, LAYOUT = "input:", "output:", "part:", "layout:"
"""How arrays in a golden file are named: an input, a whole output, or a part of one with its layout, which is
the step and then the output's shape."""


@dataclass(frozen=True)
class RecordedOutput:
    """What a golden file holds of an output: every `step`-th element in C order, flat unless it is 1."""

    values: Array
    shape: tuple[int, ...]
    step: int = 1


def check_answers(
    session: onnxruntime.InferenceSession, config: LoaderConfig, root: Path, *, variant: Variant
) -> None:
    """Runs the golden sample and raises unless every output is within its tolerance.

    Raises:
        LoadError: An output differs, is missing, or the run failed.
        BundleError: The sample cannot be read, or lies outside the bundle.
    """
    from ortprep.runtime.tensors.arrays import run_session

    golden = golden_of(config, variant)
    feeds, expected = read_golden(golden, root)
    subject = f"variant {variant.name!r} of {root}"
    hint = f"ortprep prepare {quoted(config.name)}"
    try:
        answers = run_session(session, feeds)
    except onnxruntime_errors() as error:
        raise LoadError(
            f"{subject} cannot run its golden sample\n  {type(error).__name__}: {error}",
            hint=hint,
        ) from error
    problems = list(find_problems(golden, expected, answers))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise LoadError(f"{subject} does not answer as recorded\n{lines}", hint=hint)


def read_golden(golden: Golden, root: Path) -> tuple[dict[str, Array], dict[str, RecordedOutput]]:
    """Returns the golden sample's inputs and what was recorded of its outputs; raises `BundleError`."""
    from ortprep.runtime.tensors.arrays import read_tensors

    path = Path(resolve_inside(root, golden.file.path))
    tensors = read_tensors(path, only_stored=True)
    outputs = {name: RecordedOutput(array, array.shape) for name, array in _select(tensors, OUTPUT).items()}
    layouts = _select(tensors, LAYOUT)
    for name, part in _select(tensors, PART).items():
        outputs[name] = _read_part(part, layouts.get(name), name=f"output {name!r} of {path}")
    return _select(tensors, INPUT), outputs


def _read_part(part: Array, layout: Array | None, *, name: str) -> RecordedOutput:
    """Returns a part of an output with where its elements are; raises `BundleError` unless they fit."""
    sizes = range(1, MAX_RANK + 2)  # of a step and a shape
    if layout is not None and layout.ndim == 1 and layout.size in sizes and layout.dtype.kind == "i":
        step, *shape = (int(number) for number in layout)
        is_possible = step > 0 and min(shape, default=0) >= 0 and is_bounded_shape(shape)
        if is_possible and part.shape == (-(-math.prod(shape) // step),):
            return RecordedOutput(part if step > 1 else part.reshape(shape), tuple(shape), step)
    raise BundleError(
        f"bad golden sample: {name}\n  expected a part of one axis, and its step and shape as integers"
    )


def _select(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def find_problems(
    golden: Golden, expected: Mapping[str, RecordedOutput], answers: Mapping[str, Array]
) -> Iterator[str]:
    """Yields what is wrong with answers to the golden sample, a line for each output that differs."""
    from ortprep.runtime.tensors.compare import compare_output

    if not expected:
        yield f"{golden.file.path} holds no output"
    for name, recorded in expected.items():
        if name not in answers:
            yield f"{name}: expected an output, got none"
            continue
        got = answers[name]
        if recorded.step > 1:
            if got.shape != recorded.shape:
                yield f"{name}: shape: expected {list(recorded.shape)}, got {list(got.shape)}"
                continue
            got = got.reshape(-1)[:: recorded.step]
        tolerance = golden.outputs.get(name) or golden.default
        result = compare_output(recorded.values, got, tolerance, name=name)
        if not result.ok:
            # Without elements to compare, the reason says it all.
            index = _index(result.worst_index, recorded)
            where = f" at {index}: expected {result.expected}, got {result.got}"
            yield f"{name}: {result.reason}{where if result.expected is not None else ''}"


def _index(worst: tuple[int, ...], recorded: RecordedOutput) -> list[int]:
    """Returns where an element of what was recorded is in its output."""
    if recorded.step == 1 or not worst:
        return list(worst)
    position, index = math.prod(worst) * recorded.step, []
    for size in reversed(recorded.shape):
        position, at = divmod(position, size)
        index.append(at)
    return index[::-1]
