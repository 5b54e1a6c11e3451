"""What does preparing a big model take? `python -m bench.big_model [--gib 2.5]`.

Generates a chain of MatMul + Relu with its weights in external data, prepares it and loads the bundle.
Reports wall time per stage, and the largest resident set (VmHWM, mapped pages included) of the build's
process and of every child, sampled from /proc while they run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.models import prepare_command
from bench.result_file import describe_machine, format_results

SIDE = 4096
LAYER_BYTES = SIDE * SIDE * 4
POLL_S = 0.05

SPEC = """\
name: big
source: {path: ../big.onnx}
inputs: {x: {shapes: [[1, 4096]]}}
targets: [cpu]
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 1, steady_s: 0.5}
"""


def write_big_model(folder: Path, *, size_bytes: int) -> int:
    """Writes `big.onnx` and its data, one layer at a time, and returns the size of the weights in bytes."""
    layers = max(1, round(size_bytes / LAYER_BYTES))
    rng = np.random.Generator(np.random.PCG64(0))
    nodes, weights = [], []
    with (folder / "big.onnx.data").open("wb") as data:
        for index in range(layers):
            values = rng.standard_normal((SIDE, SIDE), dtype=np.float32) * np.float32((2 / SIDE) ** 0.5)
            weights.append(_external_tensor(f"w{index}", offset=data.tell()))
            values.tofile(data)
            nodes.append(
                helper.make_node("MatMul", [f"h{index}" if index else "x", f"w{index}"], [f"m{index}"])
            )
            nodes.append(
                helper.make_node("Relu", [f"m{index}"], [f"h{index + 1}" if index + 1 < layers else "y"])
            )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SIDE]) for name in "xy")
    graph = helper.make_graph(nodes, "big", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "big.onnx")
    return layers * LAYER_BYTES


def _external_tensor(name: str, *, offset: int) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[SIDE, SIDE])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "big.onnx.data"), ("offset", offset), ("length", LAYER_BYTES)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor


@dataclass
class Peaks:
    """Largest resident sets seen, in bytes.

    Attributes:
        parent: Peak of the watched process.
        children: Peaks of its descendants, by function.
    """

    parent: int = 0
    children: dict[str, int] = field(default_factory=dict)


def run_watched(command: list[str], *, cwd: Path) -> tuple[Peaks, float, str]:
    """Runs a command, samples its process tree, and returns the peaks, wall seconds and its stderr."""
    peaks = Peaks()
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=cwd, stderr=log, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            _sample(process.pid, peaks)
            time.sleep(POLL_S)
        log.seek(0)
        text = log.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{text}")
    return peaks, time.perf_counter() - started, text


def _sample(pid: int, peaks: Peaks) -> None:
    peaks.parent = max(peaks.parent, _peak_bytes(pid))
    for child in _descendants(pid):
        with contextlib.suppress(OSError):
            name = _function_of(child)
            peaks.children[name] = max(peaks.children.get(name, 0), _peak_bytes(child))


def _function_of(pid: int) -> str:
    """Returns the function that a child of the build runs, from the job's file among its arguments."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    for word in words:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(Path(word).read_bytes())["function"])
    return "starting"


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        return children + [grandchild for child in children for grandchild in _descendants(child)]
    return []


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def prepare_big_model(folder: Path, *, size_bytes: int) -> dict[str, Any]:
    """Generates, prepares and loads a model below `folder`, and returns the figures."""
    weights_bytes = write_big_model(folder, size_bytes=size_bytes)
    (folder / "configs").mkdir()
    (folder / "configs" / "big.yaml").write_text(SPEC)
    command = prepare_command(folder / "configs", folder / "artifacts")
    peaks, elapsed_s, text = run_watched(command, cwd=folder)
    manifest = json.loads((folder / "artifacts" / "big" / "manifest.json").read_text())
    load = [sys.executable, "-c", "from ortprep.runtime import load; load('artifacts/big', check='golden')"]
    load_peaks, load_s, _ = run_watched(load, cwd=folder)
    return {
        "weights_gib": round(weights_bytes / 2**30, 2),
        "prepare_s": round(elapsed_s, 1),
        "stages": [line for line in text.splitlines() if line.startswith("done ")],
        "parent_peak_mib": round(peaks.parent / 2**20),
        "children_peak_mib": {name: round(peak / 2**20) for name, peak in sorted(peaks.children.items())},
        "children_peak_over_model": round(max(peaks.children.values()) / weights_bytes, 2),
        "load_s": round(load_s, 2),
        "load_peak_over_model": round(load_peaks.parent / weights_bytes, 2),
        "decision": [variant["decision"] for variant in manifest["variants"] if variant["decision"]],
    }


def main() -> None:
    """Runs the benchmark and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="big-model-") as folder:
        result = prepare_big_model(Path(folder), size_bytes=int(arguments.gib * 2**30))
    print(format_results({"question": "preparing a big model", **result, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
