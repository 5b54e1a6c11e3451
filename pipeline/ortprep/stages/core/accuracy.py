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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.digest import digest_file, digest_json
from ortprep.children.answers import Answer, Answers, read_answer
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, SpecError
from ortprep.measuring.accuracy import compare_answers, find_gate_failures
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, element_type_of, widen
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.samples import Sample

_FIELD = "convert.gate.metric"
_HINT = "def NAME(inputs, expected, got) -> float, in a module beside the spec; each is a list of dicts"

MetricRequest = tuple[
    str, Path, tuple[Path, ...], tuple[tuple[Answer, ...], ...], tuple[tuple[Answer, ...], ...]
]
"""A metric as the spec has it, the spec's folder, the samples' files, and both models' answers per sample."""


class AccuracyResult(NamedTuple):
    """Accuracy of every output, and the gate's failures, a line each."""

    outputs: tuple[OutputAccuracy, ...]
    failures: tuple[str, ...]


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
    of_all: bool = True,
) -> AccuracyResult:
    """Compares all answers of a converted model with the source's, by the gate and by the user's own metric.

    Without `of_all`, the samples are a part, and thresholds over all of them are not applied.

    Raises:
        SpecError: The user's metric does not work.
        StageError: An answer's file is missing.
    """
    answers = ({one.output: read_answer(one) for one in sample} for sample in got.samples)
    outputs = compare_answers(expected.samples, answers)
    gate = convert_section(spec).gate
    failures = list(find_gate_failures(convert_section(spec).thresholds(of_all=of_all), outputs))
    if of_all and not failures and gate.metric is not None and gate.metric_at_least is not None:
        paths = tuple(sample.path.resolve() for sample in samples)
        request = (gate.metric, spec.folder.resolve(), paths, expected.samples, got.samples)
        value = run_user_metric(request, timeout_s=convert_section(spec).timeout_s)
        if not value >= gate.metric_at_least:
            failures.append(
                f"metric {gate.metric}: {value:.6g}, expected at least {gate.metric_at_least:.6g}"
            )
    return AccuracyResult(outputs, tuple(failures))


def convert_section(spec: ModelSpec) -> ConvertSpec:
    """Returns the section of a spec that converts."""
    assert spec.convert is not None
    return spec.convert


def run_user_metric(request: MetricRequest, *, timeout_s: float | None) -> float:
    """Calls the user's metric in a fresh process, and returns its finite number.

    Raises:
        BundleError: A sample cannot be read; and what `call_guarded` raises.
    """
    return call_guarded(
        call_metric, request, function=request[0], field=_FIELD, hint=_HINT, timeout_s=timeout_s
    )


def call_metric(request: MetricRequest) -> float:
    """Calls the user's metric in this process, a child of `run_user_metric`; raises as it does."""
    metric, folder, samples, *sides = request
    inputs = [_widen_all(read_tensors(sample)) for sample in samples]
    expected, got = (
        [_widen_all({one.output: np.load(one.file, allow_pickle=False) for one in sample}) for sample in side]
        for side in sides
    )
    return call_function(metric, folder, (inputs, expected, got), field=_FIELD, hint=_HINT)


def _widen_all(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns arrays by name, with types that numpy has."""
    return {
        name: array if element_type_of(array.dtype) is None else widen(array)
        for name, array in arrays.items()
    }


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


Q = TypeVar("Q")

_TEXTS_HINT = "def NAME(plain, candidate) -> float, in a module beside the spec, of the program's stdout"

TextsRequest = tuple[str, Path, tuple[str, ...], str]
"""A function as `module:function`, the spec's folder, its arguments, and the field of the spec."""


def call_guarded(
    child: Callable[[Q], float], request: Q, *, function: str, field: str, hint: str, timeout_s: float | None
) -> float:
    """Runs a child function that calls a function of the user's, and returns its finite number.

    Raises:
        SpecError: The function cannot be found, raised, took too long, ended its process, or returned
            something else. Only the user can fix it, so no fallback step may hide it.
        ChildKilledError: Something outside killed the process, most often the kernel for want of memory.
    """
    try:
        return run_child(child, request, timeout_s=timeout_s).value
    except ChildKilledError:
        raise
    except ChildError as error:
        raise SpecError(f"{field} gave no answer: {function}\n  {error.message}", hint=hint) from error


def compare_texts(
    function: str, folder: Path, texts: Sequence[str], *, field: str, timeout_s: float | None
) -> float:
    """Returns what a function of the user's says of two texts; raises as `call_guarded` does."""
    request: TextsRequest = (function, folder.resolve(), tuple(texts), field)
    return call_guarded(
        call_on_texts, request, function=function, field=field, hint=_TEXTS_HINT, timeout_s=timeout_s
    )


def call_on_texts(request: TextsRequest) -> float:
    """Child function of `compare_texts`."""
    function, folder, texts, field = request
    return call_function(function, folder, texts, field=field, hint=_TEXTS_HINT)


def call_function(
    function: str, folder: Path, arguments: Sequence[object], *, field: str, hint: str
) -> float:
    """Calls `module:function` of a folder in this process, a child, and returns its finite number.

    Raises:
        SpecError: It cannot be found, raised, or returned something else.
    """
    module, _, name = function.partition(":")
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder is the user's
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        lines = textwrap.indent("".join(traceback.format_exception(error, limit=-2)).rstrip(), "  ")
        raise SpecError(f"{field} failed: {function}\n{lines}", hint=hint) from error
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(
            f"{field} returned no finite number: {function}\n"
            f"  expected a float, got {type(value).__name__} {repr(value)[:80]}",
            hint=hint,
        )
    return number
