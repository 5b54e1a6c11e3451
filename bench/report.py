"""How long does a report take, and how large is it? `python -m bench.report [--models 50] [--trials 40]`.

Generates the records of that many bundles, each with a search of that many trials, and times `ortprep report`
in fresh processes, the start of Python included. A headless Chromium, if there is one, then opens the page.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.result_file import describe_machine, format_results
from tests.report.builders import Story, write_bundles

GOAL_S, GOAL_BYTES = 5.0, 5_000_000


def run_report(artifacts: Path, out: Path) -> float:
    """Runs `ortprep report` in a fresh process and returns its wall time in seconds."""
    command = [sys.executable, "-m", "ortprep", "report", "--artifacts", str(artifacts), "--out", str(out)]
    started = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stderr}")
    return elapsed_s


def open_page(page: Path, repeats: int) -> dict[str, Any] | None:
    """Returns how long a browser takes until the page can be used and its first chart is drawn."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return None
    from tests.report.conftest import browser

    ready, drawn = [], []
    with browser() as opened:
        for _ in range(repeats):
            started = time.perf_counter()
            opened.show(page)
            ready.append(time.perf_counter() - started)
            opened.wait_for("document.querySelector('figure[data-drawn]') !== null")
            drawn.append(time.perf_counter() - started)
    return {"ready_s": summarise(ready), "first_chart_s": summarise(drawn)}


def summarise(seconds: list[float]) -> dict[str, float]:
    """Returns median and range."""
    figures = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Runs the benchmark and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        artifacts, page = Path(name) / "artifacts", Path(name) / "report.html"
        stories = [
            Story(name=f"model-{index:02d}", trials=arguments.trials, seed=index, sooner=2 + index % 9)
            for index in range(arguments.models)
        ]
        write_bundles(artifacts, stories)
        seconds = [run_report(artifacts, page) for _ in range(arguments.repeats + 1)][1:]
        size_bytes = page.stat().st_size
        opened = open_page(page, arguments.repeats)
    took = summarise(seconds)
    result = {
        "question": "ortprep report of made-up bundles",
        "models": arguments.models,
        "trials_per_model": arguments.trials,
        "processes": arguments.repeats,
        "elapsed_s": took,
        "size_bytes": size_bytes,
        "browser": opened,
        "within_goals": took["median"] < GOAL_S and size_bytes < GOAL_BYTES,
        "goals": {"elapsed_s": GOAL_S, "size_bytes": GOAL_BYTES},
        "machine": describe_machine(),
    }
    print(format_results(result))


if __name__ == "__main__":
    main()
