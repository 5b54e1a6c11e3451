"""What a process does that runs one or more models at once, a thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode
from pipeline.bundle.session_record import SessionPlan
from pipeline.diagnose.parallel.barrier import Barrier, values_of
from pipeline.diagnose.parallel.processes import join
from pipeline.errors import LoadError
from pipeline.runtime.loading.session import build_session, import_onnxruntime, onnxruntime_errors
from pipeline.runtime.tensors import read_tensors, run_session

_WARM_UP_RUNS = 3
_LEAST_RUNS = 3


def run_models(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs models, and measures each run of each while all of them, in all processes, run.

    Args:
        request: `plans` and `samples`, one of each per model; `window_s`, how long; `barrier` and
            `participants`, as `run_together` adds them, a model being one participant.

    Returns:
        `onnxruntime`, the version, and per model `run_ms`, of each run in order, and `cpu_share`: processor
        time of the thread that ran it by the time that went by.

    Raises:
        LoadError: A session cannot be made, or does not run.
        ChildError: Another process failed.
    """
    barrier = join(request)
    plans = [decode(SessionPlan, plan) for plan in request["plans"]]
    runs = [_prepare(plan, Path(sample)) for plan, sample in zip(plans, request["samples"], strict=True)]
    with ThreadPoolExecutor(len(runs)) as threads:
        measured = values_of([threads.submit(_measure, run, barrier, request["window_s"]) for run in runs])
    return {"onnxruntime": import_onnxruntime().__version__, "models": measured}


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


def _measure(run: Callable[[], object], barrier: Barrier, window_s: float) -> dict[str, Any]:
    with barrier.kept():
        for _ in range(_WARM_UP_RUNS):
            run()
        barrier.wait("warm")
        figures = _measure_window(run, window_s)
        # Runs on until nobody measures: the slowest would else be measured on a machine that falls idle.
        barrier.arrive("measured")
        while not barrier.is_complete("measured"):
            run()
    return figures


def _measure_window(run: Callable[[], object], window_s: float) -> dict[str, Any]:
    run_ms: list[float] = []
    begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
    now_s = begun_s
    while len(run_ms) < _LEAST_RUNS or now_s < begun_s + window_s:
        run()
        before_s, now_s = now_s, time.perf_counter()
        run_ms.append((now_s - before_s) * 1e3)
    return {"run_ms": run_ms, "cpu_share": (time.thread_time() - begun_cpu_s) / (now_s - begun_s)}
