"""Does the optimize stage keep every operator's answer? Runs node and simple cases of the ONNX backend suite.

    python -m bench.backend_suite [--every N] [--jobs 2] [--out FILE.json]

A case counts if the installed ONNX Runtime gives the suite's expected answer from the source. The first step
of the optimize stage's ladder must then give that answer too, or the case is listed here with its reason. The
exit code is 1 if a case is neither equal nor listed, or is listed and equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bench.backend_case import CRASHED, EQUAL, NOT_RUN, Verdict
from bench.result_file import describe_machine, format_results

SUMMARY = "Checks that the optimize stage keeps every operator's answer."

LISTED: Mapping[str, str] = {
    "test_loop16_seq_none": "ONNX Runtime writes a Loop body that defines one name twice, at every level, "
    "and refuses to load it; the ladder ends at the source",
}
"""Cases that do not come out equal at the ladder's first step, and why."""

FIRST_STEP = "all"
AS_LISTED, NEITHER = "listed", "neither"

SILENCE_S = 1200.0
"""How long a worker may say nothing before it is killed: the suite's loading, then each case.

A guard against hanging alone: loading takes 12 s of a processor, and minutes where ten programs share it.
"""


def run_suite(*, every: int = 1, jobs: int = 2) -> tuple[Verdict, ...]:
    """Checks every `every`-th case, by name, in `jobs` processes; a crash costs one case."""
    with ThreadPoolExecutor(jobs) as pool:
        shares = pool.map(lambda first: list(_run_share(first, step=jobs, every=every)), range(jobs))
        return tuple(sorted((verdict for share in shares for verdict in share), key=lambda v: v.case))


def _run_share(first: int, *, step: int, every: int) -> Iterator[Verdict]:
    position: int | None = first
    while position is not None:
        position = yield from _run_worker(position, step=step, every=every)


def _run_worker(first: int, *, step: int, every: int) -> Generator[Verdict, None, int | None]:
    """Yields verdicts until the worker ends; returns where the next one must start, None at the end."""
    command = [sys.executable, "-m", "bench.backend_case", str(first), str(step), str(every)]
    started: tuple[int, str] | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
        assert worker.stdout is not None
        for line in _lines_before_silence(worker):
            message = json.loads(line)
            if "index" in message:
                started = (message["index"], message["case"])
            else:
                started = None
                yield Verdict(**message)
    if started is None and worker.returncode:
        raise SystemExit(f"worker cannot start: exit code {worker.returncode}\n  {' '.join(command)}")
    if started is None:
        return None
    yield Verdict(started[1], CRASHED, _describe(worker.returncode))
    return started[0] + step


def _lines_before_silence(worker: subprocess.Popen[str]) -> Iterator[str]:
    assert worker.stdout is not None
    while True:
        timer = threading.Timer(SILENCE_S, worker.kill)
        timer.start()
        try:
            line = worker.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            return
        yield line


def _describe(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def find_surprises(verdicts: Sequence[Verdict], listed: Mapping[str, str] = LISTED) -> tuple[str, ...]:
    """Returns cases that are neither equal nor listed, and listed ones that are equal, one a line."""
    kinds = {verdict.case: classify(verdict, listed) for verdict in verdicts}
    wrong = [v for v in verdicts if kinds[v.case] == NEITHER]
    stale = [v for v in verdicts if kinds[v.case] == EQUAL and v.case in listed]
    return (
        *(f"{v.case}: {v.outcome} at step {v.step!r}: {v.detail}" for v in wrong),
        *(f"{v.case}: listed ({listed[v.case]}), but equal" for v in stale),
    )


def classify(verdict: Verdict, listed: Mapping[str, str] = LISTED) -> str:
    """Returns the table row of a verdict."""
    if verdict.outcome == NOT_RUN:
        return NOT_RUN
    if verdict.outcome == EQUAL and verdict.step == FIRST_STEP:
        return EQUAL
    return AS_LISTED if verdict.case in listed else NEITHER


def describe_counts(verdicts: Sequence[Verdict], listed: Mapping[str, str] = LISTED) -> str:
    """Returns the counts as lines of a table."""
    counts = Counter(classify(verdict, listed) for verdict in verdicts)
    rows = (
        ("cases", len(verdicts)),
        ("not run by ONNX Runtime itself", counts[NOT_RUN]),
        ("equal after optimize and reload", counts[EQUAL]),
        ("listed with a reason", counts[AS_LISTED]),
        ("neither", counts[NEITHER]),
    )
    return "\n".join(f"{name:<32} {count:>5}" for name, count in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite and prints the counts."""
    parser = argparse.ArgumentParser(prog="python -m bench.backend_suite", description=SUMMARY)
    parser.add_argument("--every", type=int, default=1, help="check every N-th case only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write verdicts and machine to this JSON file")
    options = parser.parse_args(arguments)
    verdicts = run_suite(every=options.every, jobs=options.jobs)
    if options.out:
        result = {"machine": describe_machine(), "verdicts": [asdict(verdict) for verdict in verdicts]}
        options.out.write_text(format_results(result) + "\n", encoding="utf-8")
    surprises = find_surprises(verdicts)
    for line in surprises:
        print(line)
    print(describe_counts(verdicts))
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
