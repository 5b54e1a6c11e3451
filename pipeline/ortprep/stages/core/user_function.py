"""Functions of the user's that judge: found in a module beside the spec, called in a child process."""

from __future__ import annotations

import importlib
import math
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, SpecError

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
