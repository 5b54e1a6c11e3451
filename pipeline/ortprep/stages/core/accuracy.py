"""Is a converted model accurate enough? The spec's gate and the user's own metric, on a session's answers.

A user's metric is a function of theirs, run in a child process on the answers of both models.

    convert: {gate: {metric: "metrics:word_error_rate"}}

    def word_error_rate(inputs, expected, got) -> float: ...

All three are lists with a dict of arrays by name per sample. Arrays of types that numpy lacks, such as
bfloat16, are given as float64 or 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.digest import digest_file, digest_json
from ortprep.children.answers import Answer, Answers
from ortprep.errors import SpecError
from ortprep.measuring.accuracy import compare_answers
from ortprep.measuring.gate import find_gate_failures
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, element_type_of, widen
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.inputs.samples import Sample
from ortprep.stages.core.user_function import call_function, call_guarded

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
    """Returns what decides whether answers are accurate enough, for keys; of a judge's arguments a digest."""
    convert = convert_section(spec)
    functions = [] if convert.gate.metric is None else [(".", convert.gate.metric)]
    if convert.judge is not None and convert.judge.function is not None:
        functions.append(convert.judge.function)
    digests = [metric_digest(name, spec.folder / folder) for folder, name in functions]
    key = {**convert.model_dump(mode="json", include={"gate", "judge"}), "functions": digests}
    if convert.judge is not None:
        key["judge"]["run"] = digest_json(convert.judge.run)
    return key


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
    outputs = compare_answers(expected.samples, got.samples)
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
    """Returns the section of a spec that converts.

    Raises:
        SpecError: It has none.
    """
    if spec.convert is None:
        raise SpecError(f"spec of {spec.name} converts nothing\n  expected a convert section, got none")
    return spec.convert


def run_user_metric(request: MetricRequest, *, timeout_s: float | None) -> float:
    """Calls the user's metric in a fresh process, and returns its finite number.

    Args:
        request: The metric, and what it is called with.
        timeout_s: Timeout of the process, in seconds; None for none.

    Raises:
        SpecError: The function does not work.
        ChildKilledError: Something outside killed the process.
        BundleError: A sample cannot be read.
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
