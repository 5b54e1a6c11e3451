"""The process that runs one or more models at once, in a thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.concurrent_models.verdict import ModelRuns
from ortprep.doctor.process_group import Barrier, join, results_of
from ortprep.errors import LoadError
from ortprep.runtime.loading.session import build_session, import_onnxruntime, onnxruntime_errors
from ortprep.runtime.tensors.arrays import read_tensors, run_session

_WARM_UP_RUNS = 3
_MIN_RUNS = 3


def run_models(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs models, and measures each run of each while all of them, in all processes, run.

    Args:
        request: `plans` and `samples`, one of each per model; `window_s`, the duration in seconds; a model is
            one participant of the barrier.

    Returns:
        `onnxruntime`, the version, and `models`, the fields of `ModelRuns` of each.

    Raises:
        LoadError: A session cannot be made, or does not run.
        ChildError: Another process failed.
    """
    barrier = join(request)
    plans = decode(tuple[SessionPlan, ...], request["plans"])
    runs = [_prepare(plan, Path(sample)) for plan, sample in zip(plans, request["samples"], strict=True)]
    with ThreadPoolExecutor(len(runs)) as threads:
        measured = results_of([threads.submit(_measure, run, barrier, request["window_s"]) for run in runs])
    return {"onnxruntime": import_onnxruntime().__version__, "models": encode(measured)}


def _prepare(plan: SessionPlan, sample: Path) -> Callable[[], object]:
    session, feeds = build_session(plan), read_tensors(sample)
    refusals = onnxruntime_errors()

    def run() -> object:
        try:
            return run_session(session, feeds)
        except refusals as error:
            raise LoadError(
                f"ONNX Runtime cannot run {plan.model}\n  {type(error).__name__}: {error}"
            ) from error

    return run


def _measure(run: Callable[[], object], barrier: Barrier, window_s: float) -> ModelRuns:
    with barrier:
        for _ in range(_WARM_UP_RUNS):
            run()
        barrier.wait("warm")
        measured = _measure_window(run, window_s)
        # Runs on until nobody measures: the slowest would otherwise be measured on an idle machine.
        barrier.arrive("measured")
        while not barrier.is_complete("measured"):
            run()
    return measured


def _measure_window(run: Callable[[], object], window_s: float) -> ModelRuns:
    run_ms: list[float] = []
    now_s = begun_s = time.perf_counter()
    while len(run_ms) < _MIN_RUNS or now_s < begun_s + window_s:
        run()
        before_s, now_s = now_s, time.perf_counter()
        run_ms.append((now_s - before_s) * 1e3)
    return ModelRuns(tuple(run_ms))
