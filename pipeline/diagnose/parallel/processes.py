"""Several child processes at once, which wait for each other and fail together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.diagnose.parallel.line import Line, cause_of
from pipeline.runtime.child import run_child

T = TypeVar("T")

_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Answers:
    """What processes that ran at once answered.

    Attributes:
        started_s: `time.monotonic()` before the first was started; the clock is one for all processes.
        values: What each returned, in the order of the requests.
    """

    started_s: float
    values: tuple[dict[str, Any], ...]


def run_together(
    function: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    participants: int,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> Answers:
    """Runs `module:function` in a fresh process for every request, all at once.

    Args:
        function: As `run_child` takes it.
        requests: JSON types; each gets `line`, the folder of a `Line`, and `participants` besides.
        participants: How many wait at that line, in all processes together.
        environments: Variables of each process on top of this one's; None for no more.

    Raises:
        PipelineError: What the first of them that failed said; the others were released.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ortprep-line-") as folder,
        ThreadPoolExecutor(len(requests), "ortprep-process") as threads,
    ):
        line = Line(Path(folder), participants)
        at_line = {"line": folder, "participants": participants}
        started_s = time.monotonic()
        with line.kept():
            answers = [
                threads.submit(_run_one, function, {**request, **at_line}, environment, line)
                for request, environment in zip(requests, environments or [{}] * len(requests), strict=True)
            ]
            return Answers(started_s, tuple(values_of(answers)))


def values_of(futures: Sequence[Future[T]]) -> list[T]:
    """Waits for participants at a line and returns what they did.

    Raises:
        BaseException: What the one raised that the others did not get on for.
    """
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise cause_of(errors)
    return [future.result() for future in futures]


def line_of(request: Mapping[str, Any]) -> Line:
    """Returns the line that a request of `run_together` names."""
    return Line(Path(request["line"]), request["participants"])


def _run_one(
    function: str, request: Mapping[str, Any], environment: Mapping[str, str], line: Line
) -> dict[str, Any]:
    with line.kept():
        return run_child(function, request, timeout_s=_TIMEOUT_S, environment=environment).value
