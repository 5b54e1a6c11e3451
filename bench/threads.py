"""What do threads by share gain? `python -m bench.threads [NAME …] [--rounds 9] [--window-s 1]`.

Trained models from PyPI wheels, prepared without a search. *two workers*: two processes run one model at the
same time on two cores, plain ONNX Runtime against `load` with `ORTPREP_WORKERS=2`. *quota*: one process in a
control group (version 1) with a quota of one core, plain against `load`. All processes stay; windows of runs
take turns in changing order, so that other work on the machine disturbs both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean, geometric_mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from bench.models import ARTIFACTS, PreparedModel
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import ROOT
from ortprep.measuring.comparison import order_of_round
from ortprep.measuring.device_lock import measuring
from ortprep.runtime.tensors.arrays import read_tensors

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
WORKERS = 2

_WORKER = """\
import json, os, sys, time
arm, model, feeds, group = sys.argv[1:]
if group:
    with open(group + "/cgroup.procs", "w") as processes:
        processes.write(str(os.getpid()))
import numpy
if arm == "plain":
    import onnxruntime
    session = onnxruntime.InferenceSession(model)
else:
    from ortprep.runtime import load, wait_steady
    session = load(model)
    wait_steady(session)
feeds = {name: numpy.load(path) for name, path in json.loads(feeds).items()}
for _ in range(5):
    session.run(None, feeds)
print("ready", flush=True)
for line in sys.stdin:
    times, now = [], time.monotonic()
    end = now + float(line)
    while now < end or len(times) < 5:
        session.run(None, feeds)
        before, now = now, time.monotonic()
        times.append(now - before)
    print(json.dumps(times), flush=True)
"""

Window = list[float]


def measure(model: PreparedModel, *, count: int, group: str, rounds: int, window_s: float) -> dict[str, Any]:
    """Returns the figures of a model in processes that run at the same time.

    Args:
        model: The prepared model.
        count: Number of processes per side.
        group: Folder of the control group that they enter; "" for none.
        rounds: Windows of each side.
        window_s: Seconds of a window.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="threads-")))
        arms = {
            arm: [_start(stack, model, arm, folder, count, group) for _ in range(count)]
            for arm in ("plain", "load")
        }
        windows: dict[str, list[Window]] = {arm: [] for arm in arms}
        for index in range(-1, rounds):  # the first does not count
            for arm in order_of_round(tuple(arms), index):
                windows[arm].append(_run(arms[arm], window_s))
    pairs = list(zip(windows["plain"][1:], windows["load"][1:], strict=True))
    plain, loaded = (list(chain.from_iterable(side)) for side in zip(*pairs, strict=True))
    return {
        "plain_median_ms": _in_ms(median(plain)),
        "load_median_ms": _in_ms(median(loaded)),
        "median": round(median(median(before) / median(after) for before, after in pairs), 2),
        "throughput": round(median(fmean(before) / fmean(after) for before, after in pairs), 2),
        "plain_p99_ms": _in_ms(_p99(plain)),
        "load_p99_ms": _in_ms(_p99(loaded)),
        "p99": round(_p99(plain) / _p99(loaded), 2),
    }


def _p99(times: Window) -> float:
    return quantiles(times, n=100, method="inclusive")[98]


def _in_ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _start(
    stack: ExitStack, model: PreparedModel, arm: str, folder: Path, count: int, group: str
) -> subprocess.Popen[str]:
    import numpy as np

    arrays = {}
    for index, (name, array) in enumerate(read_tensors(model.sample).items()):
        arrays[name] = str(folder / f"{index}.npy")
        np.save(arrays[name], array)
    path = model.source if arm == "plain" else model.bundle
    environment = {**os.environ, "ORTPREP_WORKERS": str(count), "ORT_DISABLE_TELEMETRY": "1"}
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, arm, str(path), json.dumps(arrays), group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _run(processes: Sequence[subprocess.Popen[str]], window_s: float) -> Window:
    """Has processes run at the same time for a while; returns the seconds of every run."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{window_s}\n")
        process.stdin.flush()
    times: Window = []
    for process in processes:
        assert process.stdout is not None
        times += json.loads(process.stdout.readline())
    return times


@contextmanager
def one_core() -> Iterator[str]:
    """Makes a control group with a quota of one core; removes it after its processes."""
    group = GROUPS / f"bench-threads-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US), encoding="ascii")
        yield str(group)
    finally:
        group.rmdir()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.threads", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(SMALL_MODELS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = options.names or list(SMALL_MODELS)
    models = prepare_small_models(names, options.artifacts.absolute(), reuse=True)
    results: dict[str, dict[str, Any]] = {"two workers": {}, "quota": {}}
    with one_core() as group:
        for model in models:
            for setting, count, place in (("two workers", WORKERS, ""), ("quota", 1, group)):
                with measuring("cpu"):
                    found = measure(
                        model, count=count, group=place, rounds=options.rounds, window_s=options.window_s
                    )
                results[setting][model.name] = found
                print(f"{model.name:<18} {setting:<12} {found}", flush=True)
    means = {
        setting: {
            name: round(geometric_mean(found[name] for found in models_found.values()), 2)
            for name in ("median", "throughput", "p99")
        }
        for setting, models_found in results.items()
    }
    print(means)
    if options.out is not None:
        report = {"machine": describe_machine(), "rounds": options.rounds, "means": means, "models": results}
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
