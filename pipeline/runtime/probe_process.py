"""What a probe's process does; it starts with next to nothing imported, so that imports can be measured."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.binding import BoundRun
    from pipeline.runtime.element_types import Array

_MB = 2**20
_LEAST_RUNS = 5
_MOST_RUNS = 20_000


class PreparedRun(NamedTuple):
    """A session and a sample, ready to run.

    Attributes:
        repeat: Runs once more.
        answer: Runs once more and returns the outputs by name, as arrays on the host.
        feeds: The sample's arrays by input name.
    """

    repeat: Callable[[], object]
    answer: Callable[[], dict[str, Array]]
    feeds: Mapping[str, Array]


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads, runs and measures.

    Args:
        request: The fields of a `ProbeRequest`, and `gpu`, the name of the GPU that takes part or None.

    Returns:
        The fields of a `ProbeResult` but `gpu_mb`, and `gpu_bytes`: the GPU's memory in use at the end.

    Raises:
        LoadError: The session could not be made, or its first run failed.
    """
    return measure_runs(request)[0]


def measure_runs(request: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[PreparedRun, ...]]:
    """Does what `measure` does, and also returns what was run: one for every sample."""
    _drop(request["drop_cache"])
    import_ms = 0.0 if request["overlap_import"] else _time(_import_onnxruntime)[0]
    prepare_ms, make_session = _time(lambda: _prepare(request))
    private_before_mb = _private_mb()
    init_ms, session = _time(make_session)
    run = _prepare_run(session, request["sample"], io_binding=request["io_binding"])
    model = request["bundle"] if request["plan"] is None else request["plan"]["model"]
    run_first = importlib.import_module("pipeline.runtime.running").run_first
    first_ms, _ = _time(lambda: run_first(run.repeat, run.feeds, model))
    # A plan is read from the request, which no job does; a bundle is read by the job itself.
    ready_ms = import_ms + init_ms + first_ms + (prepare_ms if request["plan"] is None else 0.0)
    figures = {
        "import_ms": import_ms,
        "init_ms": init_ms,
        "first_ms": first_ms,
        "ready_ms": ready_ms,
        "private_before_mb": private_before_mb,
        **_measure_steady(run, request["steady_s"]),
    }
    more = [
        _prepare_run(session, sample, io_binding=request["io_binding"]) for sample in request["more_samples"]
    ]
    figures |= {
        "more_steady_ms": [_measure_other(other, request["steady_s"]) for other in more],
        **_read_memory(session, request["gpu"]),
        "onnxruntime": _import_onnxruntime().__version__,
    }
    return figures, (run, *more)


def _time(function: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = function()
    return (time.perf_counter() - started) * 1e3, value


def _drop(files: list[str]) -> None:
    if files:
        from pathlib import Path

        from pipeline.runtime.page_cache import drop_file

        for file in files:
            drop_file(Path(file))


def _import_onnxruntime() -> Any:
    import onnxruntime

    return onnxruntime


def _prepare(request: Mapping[str, Any]) -> Callable[[], onnxruntime.InferenceSession]:
    if request["plan"] is None:
        from pipeline.runtime.loading import load

        if not request["overlap_import"]:
            # `load` imports it while ONNX Runtime is imported; here that is over, and `init_ms` is to be the
            # initialisation alone.
            importlib.import_module("pipeline.runtime.opening")
        bundle, target = request["bundle"], request["target"]
        return lambda: load(bundle, target=target)

    from pipeline.bundle.codec import decode
    from pipeline.runtime.session import SessionPlan, build_session

    plan = decode(SessionPlan, request["plan"])
    return lambda: build_session(plan)


def _prepare_run(session: onnxruntime.InferenceSession, sample: str, *, io_binding: bool) -> PreparedRun:
    from pathlib import Path

    from pipeline.runtime.tensors import fit_feeds, half_inputs, read_tensors, run_session

    feeds = fit_feeds(read_tensors(Path(sample)), half_inputs(session))
    if io_binding:
        from pipeline.runtime.binding import BoundRun

        bound = BoundRun(session, feeds)
        return PreparedRun(bound, lambda: _answers_of(bound), feeds)
    return PreparedRun(lambda: run_session(session, feeds), lambda: run_session(session, feeds), feeds)


def _answers_of(bound: BoundRun) -> dict[str, Array]:
    """Runs once more, replaying what was recorded, if anything was: those answers are the ones that count."""
    bound()
    return bound.outputs()


def _measure_other(run: PreparedRun, steady_s: float) -> float:
    run.repeat()
    return float(_measure_steady(run, steady_s)["steady_ms"])


def _measure_steady(run: PreparedRun, steady_s: float) -> dict[str, Any]:
    import numpy as np

    times: list[float] = []
    end = time.perf_counter() + steady_s
    while len(times) < _LEAST_RUNS or (time.perf_counter() < end and len(times) < _MOST_RUNS):
        times.append(_time(run.repeat)[0])
    p25, median, p75, p99 = (float(value) for value in np.percentile(times, (25, 50, 75, 99)))
    return {
        "steady_ms": median,
        "steady_p25_ms": p25,
        "steady_p75_ms": p75,
        "steady_p99_ms": p99,
        "runs": len(times),
    }


def _private_mb() -> float:
    from pipeline.runtime.memory import private_bytes

    return private_bytes() / _MB


def _read_memory(session: onnxruntime.InferenceSession, gpu: str | None) -> dict[str, Any]:
    from pipeline.runtime.gpu_memory import used_gpu_bytes
    from pipeline.runtime.memory import peak_rss_bytes
    from pipeline.runtime.session import CUDA

    on_gpu = gpu is not None and CUDA in session.get_providers()
    return {
        "private_mb": _private_mb(),
        "peak_mb": peak_rss_bytes() / _MB,
        "gpu_bytes": used_gpu_bytes(gpu) if on_gpu and gpu is not None else None,
    }
