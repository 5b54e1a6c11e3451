"""How long does `doit prepare` take with nothing to do? `python -m bench.noop [--specs 100]`.

Prepares one small model under every name, then times `doit prepare` in fresh processes. `--shipped` times the
shipped specs instead; prepare them first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from bench.result_file import describe_machine, format_results

ROOT = Path(__file__).resolve().parent.parent
SPEC = """\
name: {name}
source: {{path: ../tiny.onnx}}
targets: [cpu]
tune: {{max_trials: 0}}
measure: {{rounds: 3, cold_rounds: 0, steady_s: 0.01}}
"""


def write_project(folder: Path, count: int) -> None:
    """Writes a model of one node and `count` specs for it."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "tiny", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "tiny.onnx",
    )
    (folder / "configs").mkdir()
    for index in range(count):
        name = f"tiny{index:03d}"
        (folder / "configs" / f"{name}.yaml").write_text(SPEC.format(name=name))


def run_prepare(*variables: str, jobs: int = 1) -> float:
    """Runs `doit prepare` in a fresh process and returns its wall time in seconds."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "doit",
        "-f",
        str(ROOT / "dodo.py"),
        *variables,
        "-n",
        str(jobs),
        "prepare",
    ]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main() -> None:
    """Runs the benchmark and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specs", type=int, default=100)
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        variables: tuple[str, ...] = ()
        if not arguments.shipped:
            write_project(Path(folder), arguments.specs)
            variables = (f"configs={folder}/configs", f"artifacts={folder}/artifacts")
            run_prepare(*variables, jobs=2)
        seconds = [run_prepare(*variables) for _ in range(arguments.repeats + 1)][1:]
    result = {
        "question": "doit prepare with nothing to do",
        "specs": "shipped" if arguments.shipped else arguments.specs,
        "median_s": round(statistics.median(seconds), 3),
        "min_s": round(min(seconds), 3),
        "max_s": round(max(seconds), 3),
        "machine": describe_machine(),
    }
    print(format_results(result))


if __name__ == "__main__":
    main()
