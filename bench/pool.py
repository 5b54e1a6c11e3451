"""What do processes and shared memory cost, and what do they save? `python -m bench.pool`.

Compares `SessionPool` with `ProcessPoolExecutor`, which pickles, on a model that does next to nothing. Starts
four workers on a large model: in parallel, one after the other, and as threads of one process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bench.big_model import write_big_model
from bench.models import prepare_command
from bench.result_file import describe_machine, format_results
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, StageError
from ortprep.runtime import PoolConfig, SessionPool, load

GOALS = {
    "large_batches": (">=", 4.0),
    "small_requests": (">=", 3.0),
    "overhead_us": ("<=", 250.0),
    "parallel_start": ("<=", 1.5),
    "further_worker_memory": ("<=", 0.15),
}
"""What each figure is to reach."""

LARGE = (16, 1024, 1024)
SMALL = (1, 1024)
WORKERS = 2
REQUESTS = 8000
START_WORKERS = 4
CORES = len(os.sched_getaffinity(0))
START_BYTES = 512 * 2**20

_TRIVIAL = """\
name: trivial
source: {path: trivial.onnx}
inputs: {x: {shapes: [[1, 1024]]}}
targets: [cpu]
runtime: {intra_op_num_threads: 1}
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 0, steady_s: 0.1}
"""
_LARGE = """\
name: large
source: {path: big.onnx}
inputs: {x: {shapes: [[1, 4096]]}}
targets: [cpu]
runtime: {session_config: {session.disable_prepacking: '1'}}
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 0, steady_s: 0.1}
"""
Array = NDArray[np.float32]


def prepare(artifacts: Path) -> None:
    """Builds both bundles with the command that users run.

    Raises:
        StageError: The command failed.
    """
    configs = artifacts / "configs-pool"
    configs.mkdir(parents=True, exist_ok=True)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "trivial", value[:1], value[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        configs / "trivial.onnx",
    )
    if not (configs / "big.onnx").exists():
        write_big_model(configs, size_bytes=START_BYTES)
    (configs / "trivial.yaml").write_text(_TRIVIAL, encoding="utf-8")
    (configs / "large.yaml").write_text(_LARGE, encoding="utf-8")
    command = prepare_command(configs, artifacts, ["trivial", "large"])
    if subprocess.run(command, check=False).returncode:
        raise StageError("cannot prepare the benchmark's models", hint=" ".join(command))


# ProcessPoolExecutor, as one would write it.

_session: Any = None


def open_session(bundle: str) -> None:
    """Opens a bundle once per process of an executor."""
    global _session
    _session = load(bundle)


def run_session(x: Array) -> Any:
    """Runs the session once."""
    return _session.run(None, {"x": x})[0]


@contextmanager
def executor_of(bundle: Path, workers: int) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes have all opened the bundle."""
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=open_session, initargs=(str(bundle),)
    ) as executor:
        list(executor.map(run_session, [np.ones(SMALL, np.float32)] * 8 * workers))
        yield executor


def windowed(submit: Callable[[], Future[Any]], requests: int, in_flight: int) -> float:
    """Returns the seconds that so many requests take, so many at a time."""
    room, failed = threading.Semaphore(in_flight), []

    def end(future: Future[Any]) -> None:
        if future.exception() is not None:
            failed.append(future)
        room.release()

    started = time.perf_counter()
    for _ in range(requests):
        room.acquire()
        submit().add_done_callback(end)
    for _ in range(in_flight):
        room.acquire()
    elapsed_s = time.perf_counter() - started
    for future in failed:
        future.result()
    return elapsed_s


def blocking(call: Callable[[], Any], requests: int, threads: int) -> float:
    """Returns the seconds that so many calls take, made by so many threads."""

    def work() -> None:
        for _ in range(requests // threads):
            call()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started


def measure_large(pool: SessionPool, executor: ProcessPoolExecutor, rounds: int) -> dict[str, Any]:
    """Measures batches of 64 MB: copied, and pickled, interleaved."""
    plain: Array = np.ones((LARGE[0] * LARGE[1], LARGE[2]), np.float32)
    threads = ThreadPoolExecutor(2 * WORKERS)
    ways = {
        "copied": lambda: threads.submit(pool.run, {"x": plain}),
        "pickled": lambda: executor.submit(run_session, plain),
    }
    for way in ways.values():
        windowed(way, 4, WORKERS)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(windowed(way, 8, WORKERS) / 8)
    return {
        "batch_bytes": plain.nbytes,
        "seconds_per_batch": seconds,
        "copied_ratio": _ratio(seconds["pickled"], seconds["copied"]),
    }


def measure_small(pool: SessionPool, executor: ProcessPoolExecutor, rounds: int) -> dict[str, Any]:
    """Measures requests of 4 KB: one thread with many in flight, and 16 threads that wait for each."""
    x: Array = np.ones(SMALL, np.float32)
    threads = ThreadPoolExecutor(2 * WORKERS)
    ways: dict[str, Callable[[], float]] = {
        "pool_window": lambda: windowed(lambda: threads.submit(pool.run, {"x": x}), REQUESTS, 64),
        "executor_window": lambda: windowed(lambda: executor.submit(run_session, x), REQUESTS, 64),
        "pool_threads": lambda: blocking(lambda: pool.run({"x": x}), REQUESTS, 16),
        "executor_threads": lambda: blocking(lambda: executor.submit(run_session, x).result(), REQUESTS, 16),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way() / REQUESTS)
    return {
        "seconds_per_request": seconds,
        "window_ratio": _ratio(seconds["executor_window"], seconds["pool_window"]),
        "threads_ratio": _ratio(seconds["executor_threads"], seconds["pool_threads"]),
    }


def measure_overhead(pool: SessionPool, bundle: Path, rounds: int) -> dict[str, Any]:
    """Measures one request of 4 KB at a time, beside the session itself."""
    session, x = load(bundle), np.ones(SMALL, np.float32)

    def time_us(call: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(1000):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
        return times

    direct, pooled = [], []
    for _ in range(rounds):
        direct.append(median(time_us(lambda: session.run(None, {"x": x}))))
        pooled.append(median(time_us(lambda: pool.run({"x": x}))))
    return {
        "direct_us": direct,
        "pool_us": pooled,
        "overhead_us": median(p - d for p, d in zip(pooled, direct, strict=True)),
    }


def open_in_threads(request: Mapping[str, Any]) -> dict[str, Any]:
    """Opens sessions of a bundle in threads of one process, or one after the other; runs in a child."""
    import onnxruntime

    del onnxruntime
    started = time.perf_counter()
    calls = [threading.Thread(target=load, args=(request["bundle"],)) for _ in range(request["count"])]
    for call in calls:
        call.start()
        if not request["together"]:
            call.join()
    for call in calls:
        call.join()
    return {"seconds": time.perf_counter() - started}


def measure_start(bundle: Path, rounds: int) -> dict[str, Any]:
    """Starts four workers on a large model: in parallel, one after the other, as threads.

    Also starts as many workers as cores, if those are fewer: more cannot start in parallel.
    """
    names = ("one", "processes", "as_many_as_cores", "sequential", "threads", "threads_one")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    private_mb: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        with SessionPool(bundle, PoolConfig(devices="cpu", threads=1)):
            seconds["one"].append(time.perf_counter() - started)
        started = time.perf_counter()
        with SessionPool(
            bundle, PoolConfig(devices="cpu", workers_per_device=START_WORKERS, threads=1)
        ) as pool:
            seconds["processes"].append(time.perf_counter() - started)
            workers = [worker.private_bytes or 0 for worker in pool.stats().workers]
            private_mb = [size / 2**20 for size in workers]
        started = time.perf_counter()
        with SessionPool(
            bundle, PoolConfig(devices="cpu", workers_per_device=min(CORES, START_WORKERS), threads=1)
        ):
            seconds["as_many_as_cores"].append(time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(START_WORKERS):
            with SessionPool(bundle, PoolConfig(devices="cpu", threads=1)):
                pass
        seconds["sequential"].append(time.perf_counter() - started)
        for name, count in (("threads", START_WORKERS), ("threads_one", 1)):
            request = {"bundle": str(bundle), "count": count, "together": True}
            seconds[name].append(run_child(open_in_threads, request).value["seconds"])
    one = median(seconds["one"])
    return {
        "workers": START_WORKERS,
        "cores": CORES,
        "as_many_as_cores_ratio": median(seconds["as_many_as_cores"]) / one,
        "model_bytes": START_BYTES,
        "seconds": seconds,
        "processes_ratio": median(seconds["processes"]) / one,
        "sequential_ratio": median(seconds["sequential"]) / one,
        "threads_ratio": median(seconds["threads"]) / median(seconds["threads_one"]),
        "private_mb": private_mb,
        "further_worker_share": max(private_mb[1:]) * 2**20 / START_BYTES,
    }


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Returns the median of the ratios of rounds."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def measure(artifacts: Path, *, rounds: int) -> dict[str, Any]:
    """Measures everything."""
    prepare(artifacts)
    trivial, large = artifacts / "trivial", artifacts / "large"
    with (
        SessionPool(trivial, PoolConfig(devices="cpu", workers_per_device=WORKERS)) as pool,
        executor_of(trivial, WORKERS) as executor,
    ):
        big = measure_large(pool, executor, rounds)
        small_full = measure_small(pool, executor, rounds)
        overhead_full = measure_overhead(pool, trivial, rounds)
    few = max(1, CORES - 1)
    with (
        SessionPool(trivial, PoolConfig(devices="cpu", workers_per_device=few)) as pool,
        executor_of(trivial, few) as executor,
    ):
        small = measure_small(pool, executor, rounds)
    with SessionPool(trivial, PoolConfig(devices="cpu")) as pool:
        overhead = measure_overhead(pool, trivial, rounds)
    start = measure_start(large, rounds)
    figures = {
        "large_batches": big["copied_ratio"],
        "small_requests": small["window_ratio"],
        "overhead_us": overhead["overhead_us"],
        "parallel_start": start["as_many_as_cores_ratio"],
        "further_worker_memory": start["further_worker_share"],
    }
    return {
        "question": "what do processes and shared memory cost, and what do they save?",
        "machine": describe_machine(),
        "workers": WORKERS,
        "goals": {name: f"{sign} {value:g}" for name, (sign, value) in GOALS.items()},
        "figures": figures,
        "missed": [name for name, value in figures.items() if not is_reached(name, value)],
        "large": big,
        "small": small,
        "overhead": overhead,
        "small_with_a_worker_per_core": small_full,
        "overhead_with_a_worker_per_core": overhead_full,
        "start": start,
    }


def is_reached(name: str, value: float) -> bool:
    """Says whether a figure reaches its goal."""
    sign, goal = GOALS[name]
    return value >= goal if sign == ">=" else value <= goal


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.pool", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, choices=range(1, 100), metavar="N")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    try:
        report = measure(options.artifacts.absolute(), rounds=options.rounds)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.out:
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    for name, value in report["figures"].items():
        verdict = "reached" if is_reached(name, value) else "MISSED"
        print(f"{name:<24} {value:>10.3g}   goal {report['goals'][name]:<8} {verdict}")
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
