"""How soon does a killed worker answer again, and what memory does one take? `python -m bench.pool_restarts`.

Trained models from PyPI wheels, prepared without a search. *forked* workers come from a template; *started*
ones load by themselves, as they do where an application has session options of its own. One worker is killed
by SIGKILL while it is idle; the time runs until the answer to a request that is sent at once. Memory is what
`--workers` of them take after a run each: private pages, and the proportional share of all with their
template's. Arms change places in each round.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from bench.models import ARTIFACTS, PreparedModel
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from ortprep.measuring.comparison import order_of_round
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.tensors.arrays import read_tensors

DEFAULT_NAMES = ("silero-vad", "magika", "rapidocr-cls", "rapidocr-det")
GOAL_MS = 30.0
"""Most milliseconds until a forked worker answers again, beside one run, at the median."""

ARMS: dict[str, dict[str, Any]] = {
    "forked": {},
    "started": {"session_options": {"intra_op_num_threads": 1}},
}


def measure(model: PreparedModel, *, rounds: int, workers: int) -> dict[str, Any]:
    """Returns medians of a model by arm, in ms and MB."""
    feeds = dict(read_tensors(model.sample))
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    steady: dict[str, list[float]] = {arm: [] for arm in ARMS}
    pools = {arm: open_pool(model, 1, settings) for arm, settings in ARMS.items()}
    try:
        for index in range(rounds):
            for arm in order_of_round(tuple(ARMS), index):
                for _ in range(3):
                    started = time.perf_counter()
                    pools[arm].run(feeds)
                steady[arm].append((time.perf_counter() - started) * 1e3)
                times[arm].append(time_restart(pools[arm], feeds) * 1e3)
    finally:
        for pool in pools.values():
            pool.close()
    return {
        arm: {
            "back_ms": round(median(times[arm]), 1),
            "back_best_ms": round(min(times[arm]), 1),
            "back_worst_ms": round(max(times[arm]), 1),
            "run_ms": round(median(steady[arm]), 2),
            **measure_memory(model, workers, settings, feeds),
        }
        for arm, settings in ARMS.items()
    }


def open_pool(model: PreparedModel, workers: int, settings: dict[str, Any]) -> SessionPool:
    """Returns a pool of workers on one thread each."""
    config = PoolConfig(devices="cpu", workers_per_device=workers, threads=1, max_restarts=10**6, **settings)
    return SessionPool(model.bundle, config)


def time_restart(pool: SessionPool, feeds: dict[str, Any]) -> float:
    """Kills a pool's worker and returns the seconds until the next answer."""
    (worker,) = pool.stats().workers
    assert worker.pid is not None
    started = time.perf_counter()
    os.kill(worker.pid, signal.SIGKILL)
    pool.run(feeds, retries=10)
    return time.perf_counter() - started


def measure_memory(
    model: PreparedModel, workers: int, settings: dict[str, Any], feeds: dict[str, Any]
) -> dict[str, float]:
    """Returns what each of several workers has for itself, and what all take, in MB."""
    with open_pool(model, workers, settings) as pool:
        with ThreadPoolExecutor(2 * workers) as threads:
            list(threads.map(pool.run, [feeds] * 8 * workers))
        pids = [worker.pid for worker in pool.stats().workers]
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        everyone = {*pids, *(int(pid) for path in children for pid in path.read_text().split())}
        return {
            "private_mb": round(median(read_memory(pid, "Private_Dirty") for pid in pids), 1),
            "all_mb": round(sum(read_memory(pid, "Pss") for pid in everyone), 1),
        }


def read_memory(pid: int | None, field: str) -> float:
    """Returns a field of a process's memory, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.pool_restarts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SMALL_MODELS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=4, help="whose memory is measured")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    names = options.names or DEFAULT_NAMES
    results = {}
    for model in prepare_small_models(names, options.artifacts.absolute(), reuse=True):
        results[model.name] = measure(model, rounds=options.rounds, workers=options.workers)
        print(f"{model.name:<16} {results[model.name]}", flush=True)
    report = {
        "question": "how soon does a killed worker answer again, and what memory does one take?",
        "machine": describe_machine(),
        "goal": f"forked: back_ms <= {GOAL_MS:g} + run_ms",
        "load_average": os.getloadavg(),
        "rounds": options.rounds,
        "workers": options.workers,
        "models": results,
    }
    if options.out:
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    missed = [
        name
        for name, arms in results.items()
        if arms["forked"]["back_ms"] > GOAL_MS + arms["forked"]["run_ms"]
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
