"""Is the pool as fast as that of another checkout? `python -m bench.pool_arms --other TREE`.

Measures both in interleaved fresh processes with the same calls, on the bundle of `bench.pool`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parents[1]
GOAL = 0.95
"""Least ratio of the other's time to this one's, at the median of rounds."""


def measure(bundle: Path, requests: int) -> dict[str, float]:
    """Returns seconds per request, by what was asked; runs in a process whose `pipeline` is the arm's."""
    from bench.pool import LARGE, SMALL, blocking, windowed
    from ortprep.runtime import PoolConfig, SessionPool

    small, middle = np.ones(SMALL, np.float32), np.ones((1, 64 * 1024), np.float32)
    plain = np.ones((LARGE[0] * LARGE[1], LARGE[2]), np.float32)
    found = {}
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        blocking(lambda: pool.run({"x": small}), 500, 1)
        found["4 KB, 64 in flight"] = windowed(lambda: pool.submit({"x": small}), requests, 64) / requests
        found["4 KB, 16 threads"] = blocking(lambda: pool.run({"x": small}), requests, 16) / requests
        found["4 KB, one at a time"] = blocking(lambda: pool.run({"x": small}), requests // 4, 1) / (
            requests // 4
        )
    with SessionPool(bundle, PoolConfig(devices="cpu", workers_per_device=2)) as pool:
        ways = {
            "256 KB, 16 in flight": (lambda: pool.submit({"x": middle}), requests // 8, 16),
            "64 MB copied": (lambda: pool.submit({"x": plain}), 24, 2),
        }
        for name, (submit, count, in_flight) in ways.items():
            windowed(submit, 8, in_flight)
            found[name] = windowed(submit, count, in_flight) / count
    return found


def run_arm(tree: Path, bundle: Path, requests: int) -> dict[str, float]:
    """Measures one tree in a fresh process."""
    command = [sys.executable, str(HERE / "bench" / "pool_arms.py"), "--arm", str(bundle), str(requests)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'pipeline'}"},
        cwd=tree,
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def compare(other: Path, bundle: Path, *, rounds: int, requests: int) -> dict[str, Any]:
    """Returns every figure of both trees, and how many times as fast this one is."""
    arms: dict[str, list[dict[str, float]]] = {"other": [], "this": []}
    for number in range(rounds):
        trees = {"other": other, "this": HERE}
        for name in sorted(trees, reverse=number % 2 == 1):
            arms[name].append(run_arm(trees[name], bundle, requests))
    ratios = {
        figure: median(a[figure] / b[figure] for a, b in zip(arms["other"], arms["this"], strict=True))
        for figure in arms["this"][0]
    }
    return {"goal": f">= {GOAL}", "ratios": ratios, "seconds": arms}


def main() -> int:
    """Compares; returns 1 if this tree is slower."""
    if sys.argv[1:2] == ["--arm"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m bench.pool_arms", description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="another checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--bundle", type=Path, default=Path("artifacts/bench/trivial"))
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args()
    from bench.result_file import describe_machine, format_results

    report = compare(
        options.other.absolute(),
        options.bundle.absolute(),
        rounds=options.rounds,
        requests=options.requests,
    )
    report = {"question": "is the pool as fast as before?", "machine": describe_machine(), **report}
    if options.out:
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    for name, ratio in report["ratios"].items():
        print(f"{name:<22} {ratio:6.2f}   {'reached' if ratio >= GOAL else 'MISSED'}")
    return 1 if min(report["ratios"].values()) < GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
