"""Is a converted model accurate enough? The spec's gate and the user's own metric, on a session's answers.

A user's metric is a function of theirs, run in a child process on the answers of both models.

    convert: {gate: {metric: "metrics:word_error_rate"}}

    def word_error_rate(inputs, expected, got) -> float: ...

All three are lists with a dict of arrays by name per sample. Arrays of types that numpy lacks, such as
bfloat16, are given as float64 or 64-bit integers.
"""

from __future__ import annotations

import importlib
import math
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.digest import digest_file, digest_json
from ortprep.children.answers import Answer, Answers, read_answer
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, SpecError
from ortprep.measuring.accuracy import compare_answers, find_gate_failures
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import BFLOAT16, Array, widen
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.samples import Sample

_METRIC_HINT = (
    "def NAME(inputs, expected, got) -> float, in a module beside the spec; each is a list of dicts"
)
_TEXTS_HINT = "def NAME(plain, candidate) -> float, in a module beside the spec, of the program's stdout"


def gate_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what decides whether answers are accurate enough, for keys."""
    convert = convert_section(spec)
    metric = convert.gate.metric
    return {
        **convert.model_dump(mode="json", include={"gate"}),
        "metric": None if metric is None else metric_digest(metric, spec.folder),
        "has_judge": convert.judge is not None,
    }


def judge_accuracy(
    spec: ModelSpec,
    samples: Sequence[Sample],
    *,
    expected: Answers,
    got: Answers,
) -> tuple[tuple[OutputAccuracy, ...], tuple[str, ...]]:
    """Returns the accuracy of every output, and why the gate or the user's own metric fails, a line each.

    Raises:
        SpecError: The user's metric does not work.
        StageError: An answer's file is missing.
    """
    answers = ({one.output: read_answer(one) for one in sample} for sample in got.samples)
    outputs = compare_answers(expected.samples, answers)
    gate = convert_section(spec).gate
    failures = list(find_gate_failures(convert_section(spec).thresholds(), outputs))
    if not failures and gate.metric is not None and gate.metric_at_least is not None:
        paths = tuple(sample.path.resolve() for sample in samples)
        sides = (expected.samples, got.samples)
        call = FunctionCall(gate.metric, spec.folder.resolve(), "convert.gate.metric", (), paths, sides)
        value = call_user_function(call, timeout_s=convert_section(spec).timeout_s)
        if not value >= gate.metric_at_least:
            failures.append(
                f"metric {gate.metric}: {value:.6g}, expected at least {gate.metric_at_least:.6g}"
            )
    return outputs, tuple(failures)


def convert_section(spec: ModelSpec) -> ConvertSpec:
    """Returns the section of a spec that converts."""
    assert spec.convert is not None
    return spec.convert


def metric_digest(metric: str, folder: Path) -> str:
    """Returns a digest of the module and those beside it; "" if it is not in the spec's folder.

    The digest does not cover what the module imports from elsewhere, or reads.

    Raises:
        OSError: A file cannot be read.
    """
    files = metric_files(metric, folder)
    return digest_json({str(path.relative_to(folder)): digest_file(path) for path in files}) if files else ""


def metric_files(metric: str, folder: Path) -> tuple[Path, ...]:
    """Returns the file of the module and those beside it; none if it is not in the spec's folder.

    Raises:
        OSError: The folder cannot be read.
    """
    base = folder.joinpath(*metric.partition(":")[0].split("."))
    # In the order in which Python looks.
    if (base / "__init__.py").is_file():
        return tuple(base.rglob("*.py"))
    return tuple(base.parent.glob("*.py")) if base.with_name(f"{base.name}.py").is_file() else ()


@dataclass(frozen=True)
class FunctionCall:
    """A function of the user's, and its arguments.

    Attributes:
        function: The function, as `module:function`.
        folder: Folder that the module is imported from.
        field: Field of the spec that names it.
        texts: Its arguments; without any, it is a metric of the samples and both models' answers to them.
        samples: Files of the samples.
        answers: Answers of the source and of the converted model, by sample.
    """

    function: str
    folder: Path
    field: str
    texts: tuple[str, ...] = ()
    samples: tuple[Path, ...] = ()
    answers: tuple[tuple[tuple[Answer, ...], ...], ...] = ()


def call_user_function(call: FunctionCall, *, timeout_s: float | None) -> float:
    """Calls a function of the user's in a fresh process, and returns its finite number.

    Raises:
        SpecError: The function cannot be found, raised, took too long, ended its process, or returned
            something else. Only the user can fix it, so no fallback step may hide it.
        ChildKilledError: Something outside killed the process, most often the kernel for want of memory.
        BundleError: A sample cannot be read.
    """
    try:
        return run_child(call_here, call, timeout_s=timeout_s).value
    except ChildKilledError:
        raise
    except ChildError as error:
        what = f"{call.field} gave no answer: {call.function}\n  {error.message}"
        raise SpecError(what, hint=_TEXTS_HINT if call.texts else _METRIC_HINT) from error


def call_here(call: FunctionCall) -> float:
    """Calls a function in this process, a child of `call_user_function`; raises as it does."""
    arguments: Sequence[object] = call.texts or _read_arguments(call)
    hint = _TEXTS_HINT if call.texts else _METRIC_HINT
    module, _, name = call.function.partition(":")
    sys.path.insert(0, str(call.folder))
    sys.dont_write_bytecode = True  # the folder is the user's
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        lines = textwrap.indent("".join(traceback.format_exception(error, limit=-2)).rstrip(), "  ")
        raise SpecError(f"{call.field} failed: {call.function}\n{lines}", hint=hint) from error
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(
            f"{call.field} returned no finite number: {call.function}\n"
            f"  expected a float, got {type(value).__name__} {repr(value)[:80]}",
            hint=hint,
        )
    return number


def _read_arguments(call: FunctionCall) -> tuple[list[dict[str, Array]], ...]:
    """Returns samples and answers as lists of arrays by name, of types that numpy has."""
    answers = (
        [{one.output: np.load(one.file, allow_pickle=False) for one in sample} for sample in side]
        for side in call.answers
    )
    lists = (map(read_tensors, call.samples), *answers)
    return tuple([_widen_all(arrays) for arrays in each] for each in lists)


def _widen_all(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: widen(array) if array.dtype == BFLOAT16 else array for name, array in arrays.items()}
