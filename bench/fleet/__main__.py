"""Runs the study: `python -m bench.fleet [--models 1000] [--seeds 3] [--seed 1] [--out FILE]`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from bench.fleet.calibration import CALIBRATION, read_calibration
from bench.fleet.simulation import simulate
from bench.fleet.study import study


def describe(results: dict[str, Any]) -> list[str]:
    """Returns the tables for people."""
    columns = ("makespan", "bound", "ratio", "TB in", "out", "req/s", "peak", "refused", "waste")
    lines = [
        f"{results['models']} models × {len(results['fleet'])} kinds, {len(results['seeds'])} seeds: medians",
        f"{'':48}" + "".join(f"{column:>9}" for column in columns),
        *(_row(f"failures: {name}", one) for name, one in results["failures"].items()),
        *(_row(name, one) for name, one in results["policies"].items()),
        "growing fleets, as many machines of each kind, largest models first",
        *(_row(name, one) for name, one in reversed(results["growing"].items())),
        f"{'what breaks first':48}{'limit':>13}{'per model':>13}{'models/h':>10}{'nodes':>8}",
    ]
    lines += [
        f"  {one['resource']:46}{one['limit']:13.4g}{one['per_model']:13.4g}"
        f"{one['models_per_hour']:10.0f}{one['nodes']:8.0f}"
        for one in results["breaks"]
    ]
    return lines


def _row(name: str, one: dict[str, Any]) -> str:
    def of(figure: str) -> float:
        return float(one[figure]["median"])

    figures = "".join(
        f"{of(figure):>9.{digits}f}"
        for figure, digits in (
            ("makespan_h", 2),
            ("bound_h", 2),
            ("ratio", 3),
            ("stored_tb", 2),
            ("loaded_tb", 2),
            ("mean_requests_s", 1),
            ("peak_requests_s", 0),
        )
    )
    shares = f"{of('impatient_share'):>9.1%}{of('wasted_share'):>9.2%}"
    return f"  {name:46}{figures}{shares}  {', '.join(one['bound_by'])}"


def main() -> None:
    """Simulates, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="The first seed.")
    parser.add_argument("--seeds", type=int, default=3, help="How many.")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    calibration = read_calibration(arguments.calibration)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn) as pool:
        results = study(
            calibration,
            lambda scenarios: list(pool.map(simulate, scenarios, repeat(calibration))),
            models=arguments.models,
            seeds=seeds,
        )
    for line in describe(results):
        print(line)
    print(f"{time.perf_counter() - started_s:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
