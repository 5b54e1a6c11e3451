"""Runs a model on the proposed inputs in a child process, and on what each failure suggests."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import Tolerance
from ortprep.children.child import run_child
from ortprep.errors import ChildError, LoadError, PipelineError, SourceError
from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_search import Attempt, Feed, InputSearch, ObservedInput, RunResult
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.element_types import Array
from ortprep.spec.models import VerifySpec
from ortprep.stages.core.ladder import plain_refusal

if TYPE_CHECKING:
    import onnxruntime

_DEADLINE_S = 600.0
_PLACE = re.compile(r"\S*/onnxruntime/\S+\.(?:cc|h):\d+ .*? was false\. ")
_MAX_ERROR = 600
_MAX_TOLD = 12
_MEMORY_SHARE = 0.75
_MAX_ELEMENTS = 2**24
_NEAR_TOLERANCE = 0.5
_MAX_RELATIVE_NOISE = 0.1


@dataclass(frozen=True)
class FailedAttempt:
    """A run that failed.

    Attributes:
        shapes: What was fed, by input.
        error: What ONNX Runtime said, in one line.
    """

    shapes: Mapping[str, tuple[int, ...]]
    error: str


@dataclass(frozen=True)
class OutputNoise:
    """How far ONNX Runtime's own optimisation moves an output beyond the usual tolerance.

    Attributes:
        max_abs: Largest absolute difference.
        is_small: Whether that is small beside the output's values.
    """

    output: str
    max_abs: float
    is_small: bool


@dataclass(frozen=True)
class InitTrial:
    """What running a model once has shown.

    Attributes:
        feeds: What was fed last: what it ran on, or what came furthest.
        chosen: Open sizes that differ from the preferred ones, by key.
        error: What ONNX Runtime said in the end; "" if it ran.
        is_finite: Whether all answers are finite numbers.
        is_repeatable: Whether a second run gave the same answers.
        failed: The first attempts that failed, in order.
        attempts: Number of runs.
        load_s: Seconds that making the session took, without optimisation.
        run_s: Seconds of one run, without optimisation; 0 if it did not run.
        noise: Outputs that need a tolerance of their own.
        onnxruntime: Version that ran it.
    """

    feeds: Mapping[str, Feed]
    chosen: Mapping[str, int]
    error: str
    is_finite: bool
    is_repeatable: bool
    failed: tuple[FailedAttempt, ...]
    attempts: int
    load_s: float
    run_s: float
    noise: tuple[OutputNoise, ...]
    onnxruntime: str

    @property
    def ran(self) -> bool:
        """Whether the model ran on what `feeds` says."""
        return not self.error


def try_inputs(
    model: Path, facts: GraphFacts, observed: Mapping[str, ObservedInput], *, timeout_s: float = _DEADLINE_S
) -> InitTrial:
    """Runs a model in a child process until it runs or nothing is left to try.

    Raises:
        SourceError: ONNX Runtime does not make a session of it, or crashes on it.
        ChildTimeoutError: The deadline passed.
        MissingExtraError: ONNX Runtime cannot be imported.
    """
    import_onnxruntime()  # a child could only report a crash without it
    request = {"model": str(model.absolute()), "facts": encode(facts), "observed": encode(dict(observed))}
    try:
        reply = run_child(
            run_trial,
            request,
            timeout_s=timeout_s,
            # Sizes that need more fail, and smaller ones are tried, before the kernel ends a process.
            memory_bytes=int(_MEMORY_SHARE * read_hardware(gpus=False).memory_bytes),
        )
        return decode(InitTrial, reply.value)
    except LoadError as error:
        reason = plain_refusal(error.message)
        raise SourceError(f"ONNX Runtime does not accept the model: {model}\n  {reason}") from error
    except ChildError as error:
        raise type(error)(f"cannot run the model: {model}\n  {error.message}", hint=error.hint) from error


def run_trial(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `try_inputs`.

    Raises:
        LoadError: ONNX Runtime does not make a session of the model.
    """
    import onnxruntime

    facts = decode(GraphFacts, request["facts"])
    search = InputSearch(facts, decode(dict[str, ObservedInput], request["observed"]))
    started = time.perf_counter()
    trial = _Trial(request["model"], search)
    load_s = time.perf_counter() - started
    best = search.find(trial.run)
    feeds = search.feeds(best.choice)
    ran = not best.result.error
    run_s = trial.time(feeds) if ran else 0.0
    noise = trial.measure_noise(feeds) if best.result.is_verifiable else ()
    return dict(
        encode(
            InitTrial(
                feeds=feeds,
                chosen=best.choice.sizes,
                error=_one_line(best.result.error),
                is_finite=best.result.is_finite,
                is_repeatable=best.result.is_repeatable,
                failed=tuple(_describe(one, search) for one in search.attempts if one.result.error)[
                    :_MAX_TOLD
                ],
                attempts=len(search.attempts),
                load_s=load_s,
                run_s=run_s,
                noise=noise,
                onnxruntime=onnxruntime.__version__,
            )
        )
    )


class _Trial:
    """A model's session without optimisation, which names the graph's own nodes when a run fails."""

    def __init__(self, model: str, search: InputSearch) -> None:
        self._model, self._search = model, search
        self._max_elements = sys.maxsize
        self._session = _open(model, "ORT_DISABLE_ALL")

    def run(self, feeds: Mapping[str, Feed]) -> RunResult:
        """Runs twice on seeded values."""
        largest = max((math.prod(feed.shape) for feed in feeds.values()), default=0)
        if largest > self._max_elements:
            return RunResult(f"an input of {largest} elements was not tried")
        # What is proposed first is tried at any size: the graph may ask for it.
        self._max_elements = min(max(largest, _MAX_ELEMENTS), self._max_elements)
        try:
            arrays = self._draw(feeds)
            first, second = (_answers(self._session, arrays) for _ in range(2))
        except _refusals() as error:
            return RunResult(str(error) or type(error).__name__)
        return RunResult(
            is_finite=all(map(_is_finite, first.values())), is_repeatable=_are_equal(first, second)
        )

    def time(self, feeds: Mapping[str, Feed]) -> float:
        """Returns the seconds of one run."""
        arrays = self._draw(feeds)
        started = time.perf_counter()
        _answers(self._session, arrays)
        return time.perf_counter() - started

    def measure_noise(self, feeds: Mapping[str, Feed]) -> tuple[OutputNoise, ...]:
        """Returns the outputs that ONNX Runtime's own optimisation moves beyond the usual tolerance."""
        from ortprep.runtime.verification.compare import compare_output

        arrays = self._draw(feeds)
        expected = _answers(self._session, arrays)
        try:
            got = _answers(_open(self._model, "ORT_ENABLE_ALL"), arrays)
        except _refusals():
            return ()
        usual = Tolerance(VerifySpec().rtol, VerifySpec().atol)
        found = []
        for name, array in expected.items():
            compared = compare_output(array, got[name], usual, name=name)
            if not compared.ok or compared.ratio > _NEAR_TOLERANCE:
                found.append(OutputNoise(name, compared.max_abs, _is_small(compared.max_abs, array)))
        return tuple(found)

    def _draw(self, feeds: Mapping[str, Feed]) -> dict[str, Array]:
        from ortprep.measuring.feeds import draw_feed, generator

        bounds = self._search.bounds
        return {
            item.name: draw_feed(
                item,
                feeds[item.name].shape,
                generator(VerifySpec().seed, item.name),
                span=feeds[item.name].drawn.range,
                values=feeds[item.name].drawn.values,
                bound=bounds.get(item.name),
            )
            for item in self._search.inputs
        }


def _refusals() -> tuple[type[Exception], ...]:
    """Returns every class of error that says that a model did not run, or could not be fed."""
    from ortprep.runtime.loading.session import onnxruntime_errors

    return (*onnxruntime_errors(), MemoryError, PipelineError)


def _open(model: str, level: str) -> onnxruntime.InferenceSession:
    from ortprep.runtime.loading.session import build_session, default_plan

    return build_session(default_plan(model, level=level, attributes={"log_severity_level": 4}))


def _answers(session: onnxruntime.InferenceSession, arrays: Mapping[str, Array]) -> dict[str, Array]:
    from ortprep.runtime.tensors.arrays import run_session

    return run_session(session, arrays)


def _is_finite(array: Array) -> bool:
    import numpy as np

    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _are_equal(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    """Says whether two runs gave the same, up to what threads may add in another order."""
    import numpy as np

    return all(
        array.shape == second[name].shape
        and (
            np.allclose(array, second[name], rtol=1e-4, atol=1e-6, equal_nan=True)
            if array.dtype.kind == "f"
            else np.array_equal(array, second[name])
        )
        for name, array in first.items()
    )


def _is_small(difference: float, array: Array) -> bool:
    import numpy as np

    if array.dtype.kind != "f" or array.size == 0:
        return False
    return difference <= _MAX_RELATIVE_NOISE * float(np.nanmax(np.abs(array)))


def _describe(attempt: Attempt, search: InputSearch) -> FailedAttempt:
    feeds = search.feeds(attempt.choice)
    return FailedAttempt({name: feed.shape for name, feed in feeds.items()}, _one_line(attempt.result.error))


def _one_line(error: str) -> str:
    return _PLACE.sub("", plain_refusal(error))[:_MAX_ERROR]
