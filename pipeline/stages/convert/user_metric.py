"""The user's own metric: a function of theirs, run in a child process on the answers of both models.

    convert: {gate: {metric: "metrics:word_error_rate"}}

    def word_error_rate(inputs, expected, got) -> float: ...

All three are lists with a dict of arrays by name per sample. Large answers are mapped from their files,
copies on write; arrays of types that numpy lacks, such as bfloat16, are given as float64 or 64-bit integers.
"""

from __future__ import annotations

import importlib
import math
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import digest_file, digest_json
from ortprep.errors import ChildError, ChildKilledError, ChildTimeoutError, StageError
from ortprep.runtime.probing.child import run_child
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, element_type_of, widen
from ortprep.runtime.verification.answers import Answer

_FIELD = "convert.gate.metric"
_SIGNATURE = "def {name}(inputs: list[dict], expected: list[dict], got: list[dict]) -> float"
_MAPPED_BYTES = 2**20
"""Smaller files are read at once: a map each would use up the numbers of open files."""


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
    _split(metric)
    request = _MetricRequest(
        metric,
        str(folder.resolve()),
        samples=tuple(str(sample.resolve()) for sample in samples),
        expected=tuple(map(tuple, expected)),
        got=tuple(map(tuple, got)),
    )
    try:
        reply = run_child(f"{__name__}:call_metric", encode(request), timeout_s=timeout_s)
    except ChildTimeoutError as error:
        hint = "make it faster, or verify with fewer samples"
        raise StageError(
            f"{_FIELD} took too long: {metric}\n  expected a number within {timeout_s:g} s", hint=hint
        ) from error
    except ChildKilledError:
        raise
    except ChildError as error:
        raise StageError(
            f"{_FIELD} ended its process: {metric}\n  {error.message}", hint=_fix_hint(metric)
        ) from error
    return float(reply.value["value"])


def metric_digest(metric: str, folder: Path) -> str:
    """Returns a digest of the module and those beside it; "" if it is not in the spec's folder.

    What it imports from elsewhere, or reads, is not looked at.

    Raises:
        StageError: The metric is not `module:function`, or its file cannot be read.
    """
    try:
        files = metric_files(metric, folder)
        if not files:
            return ""
        return digest_json({path.relative_to(folder).as_posix(): digest_file(path) for path in files})
    except OSError as error:
        raise StageError(f"{_FIELD} cannot be read: {metric}\n  {error.strerror or error}") from error


def metric_files(metric: str, folder: Path) -> tuple[Path, ...]:
    """Returns the file of the module and those beside it; none if it is not in the spec's folder.

    Raises:
        StageError: The metric is not `module:function`.
        OSError: The folder cannot be read.
    """
    module, _ = _split(metric)
    file = _find_file(module, folder)
    if file is None:
        return ()
    return tuple(file.parent.rglob("*.py") if file.name == "__init__.py" else file.parent.glob("*.py"))


def call_metric(request: Mapping[str, Any]) -> dict[str, float]:
    """Child function of `run_user_metric`: its arguments as JSON types in, `value` out.

    Raises:
        StageError: The function cannot be found, raised, or returned no finite number.
        BundleError: A sample cannot be read.
    """
    wanted = decode(_MetricRequest, request)
    _allow_many_maps()
    function = _import_metric(wanted.metric, Path(wanted.folder))
    inputs = [_to_common(read_tensors(Path(sample))) for sample in wanted.samples]
    expected, got = ([_read_arrays(answers) for answers in side] for side in (wanted.expected, wanted.got))
    with _name_failing_line(wanted.metric, "failed", Path(wanted.folder)):
        value = function(inputs, expected, got)
    return {"value": _to_number(wanted.metric, value)}


def _fix_hint(metric: str) -> str:
    return f"mend {metric.partition(':')[0]}, or take {_FIELD} out of the spec"


def _split(metric: str) -> tuple[str, str]:
    module, _, function = metric.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise StageError(
            f"{_FIELD} is no function: {metric!r}\n  expected module:function, such as metrics:accuracy",
            hint=f"{_FIELD}: metrics:accuracy  (for the function accuracy of metrics.py beside the spec)",
        )
    return module, function


def _find_file(module: str, folder: Path) -> Path | None:
    base = folder.joinpath(*module.split("."))
    # In the order in which Python looks.
    files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _import_metric(metric: str, folder: Path) -> Callable[[Any, Any, Any], object]:
    name, function = _split(metric)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder is the user's
    module = _import_module(metric, name, folder)
    found: Callable[[Any, Any, Any], object] | None = getattr(module, function, None)
    if not callable(found):
        lack = "has no such function" if found is None else f"has no function, but {type(found).__name__}"
        raise StageError(
            f"{_FIELD} is not found: {metric}\n  {module.__file__ or name} {lack}",
            hint=_SIGNATURE.format(name=function),
        )
    return found


def _import_module(metric: str, name: str, folder: Path) -> ModuleType:
    try:
        with _name_failing_line(metric, "cannot be imported", folder):
            module = importlib.import_module(name)
    except StageError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or not f"{name}.".startswith(f"{missing.name}."):
            raise
        raise StageError(
            f"{_FIELD} is not found: {metric}\n"
            f"  no module {missing.name!r} in {folder} or among the installed packages",
            hint=f"write {folder.joinpath(*name.split('.'))}.py",
        ) from missing
    own, imported = _find_file(name, folder), module.__file__
    if own is not None and (imported is None or Path(imported).resolve() != own.resolve()):
        raise StageError(
            f"{_FIELD} has the name of another module: {metric}\n  expected {own}, got {imported or name}",
            hint=f"rename {own.name}",
        )
    return module


@contextmanager
def _name_failing_line(metric: str, what: str, folder: Path) -> Iterator[None]:
    """Turns whatever the user's code raises into a `StageError` that names the line."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        said = str(error).strip().replace("\n", "\n  ")
        raise StageError(
            f"{_FIELD} {what}: {metric}\n  {type(error).__name__}: {said}{_place(error, folder)}",
            hint=_fix_hint(metric),
        ) from error


def _place(error: BaseException, folder: Path) -> str:
    """Returns the innermost line of the user's code in a traceback; "" without one."""
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder.resolve())]
    return f"\n  {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _to_number(metric: str, value: Any) -> float:
    try:
        number = None if isinstance(value, bool | np.bool_ | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not math.isfinite(number):
        got = repr(value)
        raise StageError(
            f"{_FIELD} returned no finite number: {metric}\n"
            f"  expected a float, got {type(value).__name__} {got[:80]}{'…' if len(got) > 80 else ''}",
            hint=_SIGNATURE.format(name=metric.partition(":")[2]),
        )
    return number


def _read_arrays(answers: Sequence[Answer]) -> dict[str, Array]:
    return _to_common({answer.output: _read_array(answer) for answer in answers})


def _read_array(answer: Answer) -> Array:
    file = Path(answer.file)
    try:
        is_large = file.stat().st_size > _MAPPED_BYTES
        # Private copies of the pages that are written to: the files are compared with others later.
        array: Array = np.load(file, mmap_mode="c" if is_large else None, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise StageError(f"cannot read output {answer.output!r}: {file}\n  {error}") from error
    return array


def _to_common(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: array if element_type_of(array.dtype) is None else widen(array)
        for name, array in arrays.items()
    }


def _allow_many_maps() -> None:
    """Raises the limit of open files: every map takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
