"""The user's own metric: a function of theirs, run in a child process on the answers of both models.

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

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import digest_file, digest_json
from ortprep.children.answers import Answer
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, StageError
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, element_type_of, widen

_FIELD = "convert.gate.metric"
_HINT = "def NAME(inputs, expected, got) -> float, in a module beside the spec; each is a list of dicts"


@dataclass(frozen=True)
class _MetricRequest:
    metric: str
    folder: str
    samples: tuple[str, ...]
    expected: tuple[tuple[Answer, ...], ...]
    got: tuple[tuple[Answer, ...], ...]


def run_user_metric(
    metric: str,
    *,
    folder: Path,
    samples: Sequence[Path],
    expected: Sequence[Sequence[Answer]],
    got: Sequence[Sequence[Answer]],
    timeout_s: float | None,
) -> float:
    """Calls the user's function in a fresh process.

    Returns:
        What the function returned: a finite number.

    Raises:
        StageError: The function cannot be found, raised, took too long, ended its process, or returned
            something else.
        ChildKilledError: Something outside killed the process, most often the kernel for want of memory.
        BundleError: A sample cannot be read.
    """
    request = _MetricRequest(
        metric,
        str(folder.resolve()),
        samples=tuple(str(sample.resolve()) for sample in samples),
        expected=tuple(map(tuple, expected)),
        got=tuple(map(tuple, got)),
    )
    try:
        reply = run_child(call_metric, encode(request), timeout_s=timeout_s)
    except ChildKilledError:
        raise
    except ChildError as error:
        raise StageError(f"{_FIELD} gave no answer: {metric}\n  {error.message}", hint=_HINT) from error
    return float(reply.value["value"])


def metric_digest(metric: str, folder: Path) -> str:
    """Returns a digest of the module and those beside it; "" if it is not in the spec's folder.

    What it imports from elsewhere, or reads, is not looked at.

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


def call_metric(data: Mapping[str, Any]) -> dict[str, float]:
    """Child function of `run_user_metric`: its arguments as JSON types in, `value` out.

    Raises:
        StageError: The function cannot be found, raised, or returned no finite number.
        BundleError: A sample cannot be read.
    """
    request = decode(_MetricRequest, data)
    inputs = [_to_common(read_tensors(Path(sample))) for sample in request.samples]
    expected, got = ([_read_arrays(answers) for answers in side] for side in (request.expected, request.got))
    module, _, function = request.metric.partition(":")
    sys.path.insert(0, request.folder)
    sys.dont_write_bytecode = True  # the folder is the user's
    try:
        value = getattr(importlib.import_module(module), function)(inputs, expected, got)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        lines = "".join(traceback.format_exception(error, limit=-2)).rstrip()
        raise StageError(
            f"{_FIELD} failed: {request.metric}\n{textwrap.indent(lines, '  ')}", hint=_HINT
        ) from error
    return {"value": _to_number(request.metric, value)}


def _to_number(metric: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise StageError(
            f"{_FIELD} returned no finite number: {metric}\n"
            f"  expected a float, got {type(value).__name__} {repr(value)[:80]}",
            hint=_HINT,
        )
    return number


def _read_arrays(answers: Sequence[Answer]) -> dict[str, Array]:
    return _to_common({answer.output: np.load(answer.file, allow_pickle=False) for answer in answers})


def _to_common(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: array if element_type_of(array.dtype) is None else widen(array)
        for name, array in arrays.items()
    }
