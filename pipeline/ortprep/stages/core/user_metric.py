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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ortprep.bundle.digest import digest_file, digest_json
from ortprep.children.answers import Answer
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, SpecError
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, element_type_of, widen

_FIELD = "convert.gate.metric"
_HINT = "def NAME(inputs, expected, got) -> float, in a module beside the spec; each is a list of dicts"


@dataclass(frozen=True)
class MetricRequest:
    """What a user's metric is called with.

    Attributes:
        metric: `module:function`, as the spec has it.
        folder: Absolute path of the spec's folder, which the module is imported from.
        samples: Absolute paths of the `.npz` files of the inputs.
        expected: The source's answers per sample.
        got: The converted model's answers per sample.
    """

    metric: str
    folder: Path
    samples: tuple[Path, ...]
    expected: tuple[tuple[Answer, ...], ...]
    got: tuple[tuple[Answer, ...], ...]


def run_user_metric(request: MetricRequest, *, timeout_s: float | None) -> float:
    """Calls the user's function in a fresh process, and returns its finite number.

    Raises:
        SpecError: The function cannot be found, raised, took too long, ended its process, or returned
            something else. Only the user can fix it, so no step of a ladder may hide it.
        ChildKilledError: Something outside killed the process, most often the kernel for want of memory.
        BundleError: A sample cannot be read.
    """
    try:
        return run_child(call_metric, request, timeout_s=timeout_s).value
    except ChildKilledError:
        raise
    except ChildError as error:
        raise SpecError(
            f"{_FIELD} gave no answer: {request.metric}\n  {error.message}", hint=_HINT
        ) from error


def call_metric(request: MetricRequest) -> float:
    """Calls the user's function in this process, a child of `run_user_metric`; raises as it does."""
    inputs = [_to_common(read_tensors(sample)) for sample in request.samples]
    expected, got = (
        [_to_common({one.output: np.load(one.file, allow_pickle=False) for one in sample}) for sample in side]
        for side in (request.expected, request.got)
    )
    module, _, function = request.metric.partition(":")
    sys.path.insert(0, str(request.folder))
    sys.dont_write_bytecode = True  # the folder is the user's
    try:
        value = getattr(importlib.import_module(module), function)(inputs, expected, got)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        lines = textwrap.indent("".join(traceback.format_exception(error, limit=-2)).rstrip(), "  ")
        raise SpecError(f"{_FIELD} failed: {request.metric}\n{lines}", hint=_HINT) from error
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(
            f"{_FIELD} returned no finite number: {request.metric}\n"
            f"  expected a float, got {type(value).__name__} {repr(value)[:80]}",
            hint=_HINT,
        )
    return number


def _to_common(arrays: Mapping[str, Array]) -> dict[str, Array]:
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
