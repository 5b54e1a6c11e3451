"""What does a worker pay whose parent loaded before the fork? `python -m bench.fork [NAME …] [--rounds 9]`.

Trained models from PyPI wheels, prepared without a search. *plain* is a fresh process of plain ONNX Runtime,
from its start to its first result; *fork* is a child of a process that called `load_before_fork`, from the
fork to its first result on the inherited session. *fork, then session* is such a child that creates a plain
session of the source model, as a worker under `--preload` does. Interleaved, the page cache warm. Private
memory is that which a child has written to (`Private_Dirty`); *activations* is by how much it grows in the
runs of a session that the child created, freed memory returned before. *workers* is what the parent and four
children take together once each has run, pages that are shared divided (`Pss`): Python, the parent's weights
and its children's pages. Models of `bench.models` with seeded weights are taken by their names, too, with
prepacked weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any

from bench.models import ARTIFACTS, DEFAULTS, SPECS, PreparedModel, demo_specs, prepare_specs
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import ROOT, ScriptTimes, plain, run_script, write_script
from ortprep.measuring.comparison import order_of_round, paired_ratio
from ortprep.measuring.device_lock import measuring
from ortprep.runtime.tensors.arrays import read_tensors

FORKS = ("fork", "fork, then session", "activations", "workers")
PREPACKED = (
    f"{DEFAULTS}runtime: {{session_config: {{session.save_external_prepacked_constant_initializers: 1}}}}\n"
)

_PARENT = """\
import ctypes, json, os, signal, sys, time
from ortprep.runtime import load_before_fork
inherited = load_before_fork(sys.argv[1])
import numpy, onnxruntime
feeds = {name: numpy.load(path) for name, path in json.loads(sys.argv[2]).items()}

def read_kib(field, pid="self"):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith(field + ":"))

def measure(session, forked, arm):
    if arm == "activations":
        ctypes.CDLL(None).malloc_trim(0)
    written = read_kib("Private_Dirty") if arm == "activations" else 0
    session.run(None, feeds)
    times = [time.monotonic()]
    for _ in range(9):
        session.run(None, feeds)
        times.append(time.monotonic())
    steady = sorted(after - before for before, after in zip(times, times[1:]))[4]
    dirty = read_kib("Private_Dirty")
    return [times[0] - forked, steady, dirty, dirty - written]

for line in sys.stdin:
    reader, writer = os.pipe()
    arm, workers, forked = line.strip(), [], time.monotonic()
    for _ in range(4 if arm == "workers" else 1):
        workers.append(os.fork())
        if workers[-1] == 0:
            creates = arm in ("fork, then session", "activations")
            session = onnxruntime.InferenceSession(sys.argv[3]) if creates else inherited
            os.write(writer, json.dumps(measure(session, forked, arm)).encode().ljust(1000))
            signal.pause()
    os.close(writer)
    found = [os.read(reader, 1000) for _ in workers]
    everyone = sum(read_kib("Pss", pid) for pid in (os.getpid(), *workers))
    print(json.dumps([*json.loads(found[0]), everyone]), flush=True)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reader)
"""


def measure(model: PreparedModel, *, rounds: int) -> dict[str, Any]:
    """Returns medians of a model, in ms and MB, and how many times sooner a fork answers."""
    with TemporaryDirectory(prefix="fork-") as folder, measuring("cpu"):
        script = Path(folder) / "plain.py"
        write_script(plain(model.source), model.sample, script, steady_s=0.2)
        with _start_parent(model, Path(folder)) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            starts: list[ScriptTimes] = []
            forks: dict[str, list[list[float]]] = {arm: [] for arm in FORKS}
            for index in range(-1, rounds):  # the first fills the page cache
                for arm in order_of_round(("plain", *forks), index):
                    if arm == "plain":
                        starts.append(run_script(script))
                        continue
                    parent.stdin.write(f"{arm}\n")
                    parent.stdin.flush()
                    forks[arm].append(json.loads(parent.stdout.readline()))
            parent.stdin.close()
    ready = [start.ready_ms for start in starts[1:]]
    inherited = forks["fork"][1:]
    firsts = [first * 1e3 for first, *_ in inherited]
    created = [first * 1e3 for first, *_ in forks["fork, then session"][1:]]
    private = median(dirty / 1024 for _, _, dirty, _, _ in inherited)
    activations = median(written / 1024 for _, _, _, written, _ in forks["activations"][1:])
    weights = sum(path.stat().st_size for path in model.source.parent.iterdir()) / 2**20
    everyone = median(pss / 1024 for *_, pss in forks["workers"][1:])
    return {
        "plain_ready_ms": round(median(ready), 1),
        "plain_steady_ms": round(median(start.steady_ms or 0 for start in starts[1:]), 2),
        "fork_first_ms": round(median(firsts), 2),
        "fork_steady_ms": round(median(steady * 1e3 for _, steady, *_ in inherited), 2),
        "fork_private_mb": round(private, 1),
        "activations_mb": round(activations, 1),
        "workers_mb": round(everyone, 1),
        "weights_mb": round(weights, 1),
        "workers_weights": round(everyone / weights, 2),
        "sooner": round(paired_ratio(ready, firsts), 2),
        "then_session_first_ms": round(median(created), 2),
        "sooner_than_then_session": round(paired_ratio(created, firsts), 2),
    }


def _start_parent(model: PreparedModel, folder: Path) -> subprocess.Popen[str]:
    import numpy as np

    arrays = {}
    for index, (name, array) in enumerate(read_tensors(model.sample).items()):
        arrays[name] = str(folder / f"{index}.npy")
        np.save(arrays[name], array)
    command = [sys.executable, "-c", _PARENT, str(model.bundle), json.dumps(arrays), str(model.source)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.fork", description=__doc__)
    known = f"of {', '.join((*SMALL_MODELS, *SPECS))}; default: the first {len(SMALL_MODELS)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = options.names or list(SMALL_MODELS)
    if unknown := [name for name in names if name not in SMALL_MODELS and name not in SPECS]:
        parser.error(f"unknown model: {', '.join(unknown)}")
    small = [name for name in names if name in SMALL_MODELS]
    specs = demo_specs([name for name in names if name not in SMALL_MODELS])
    models = (
        *prepare_small_models(small, options.artifacts.absolute(), reuse=True),
        *prepare_specs(specs, ARTIFACTS.absolute() / "large-prepacked", defaults=PREPACKED, reuse=True),
    )
    results = {}
    for model in models:
        results[model.name] = found = measure(model, rounds=options.rounds)
        print(f"{model.name:<18} {found}", flush=True)
    mean = round(geometric_mean(found["sooner"] for found in results.values()), 2)
    then = round(geometric_mean(found["sooner_than_then_session"] for found in results.values()), 2)
    print(f"{then}× sooner than a child that creates its session, in geometric mean")
    print(f"{mean}× sooner in geometric mean, least {min(found['sooner'] for found in results.values())}×")
    if options.out is not None:
        report = {"machine": describe_machine(), "rounds": options.rounds, "sooner": mean, "models": results}
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
