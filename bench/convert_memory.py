"""How much memory does a conversion take? `python -m bench.convert_memory [--gib 2.5] [--pass float16 ...]`.

Generates a chain of MatMul + Relu with its weights in external data, runs each pass over it in a child
process, and reports the child's largest resident set as the kernel has it (ru_maxrss: mapped pages included),
next to the model's size. A new pass is one more line of `PASSES`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.big_model import write_big_model
from bench.machine import describe_machine
from pipeline.runtime.child import run_child

_ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Pass:
    """A conversion that runs in a child.

    Attributes:
        function: Its `module:function`.
        request: What it is asked, besides `source` and `written`.
    """

    function: str
    request: Mapping[str, Any]


_PASSES = "pipeline.stages.convert.passes"
_HALF = f"{_PASSES}.half:convert_half"
_WEIGHTS = f"{_PASSES}.quantize_weights:quantize_weights"
_DYNAMIC = f"{_PASSES}.quantize_dynamic:quantize_dynamic"
PASSES = {
    "float16": Pass(_HALF, {"dtype": "float16"}),
    "bfloat16": Pass(_HALF, {"dtype": "bfloat16"}),
    "int4-weights": Pass(_WEIGHTS, {"exclude": [], "operators": [], "bits": 4}),
    "int8-weights": Pass(_WEIGHTS, {"exclude": [], "operators": [], "bits": 8}),
    "int8-dynamic": Pass(_DYNAMIC, {"exclude": [], "operators": []}),
}


def measure(chosen: Pass, source: Path, folder: Path, *, weights_bytes: int) -> dict[str, Any]:
    """Runs one pass into a folder of its own, which is removed, and returns the figures."""
    folder.mkdir()
    try:
        request = {**chosen.request, "source": str(source), "written": str(folder / source.name)}
        reply = run_child(chosen.function, request, timeout_s=_TIMEOUT_S)
        written_bytes = sum(path.stat().st_size for path in folder.iterdir())
    finally:
        shutil.rmtree(folder)
    return {
        "elapsed_s": round(reply.elapsed_s, 1),
        "written_gib": round(written_bytes / 2**30, 2),
        "peak_mib": round(reply.peak_rss_bytes / 2**20),
        "peak_over_model": round(reply.peak_rss_bytes / weights_bytes, 3),
    }


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.5, help="size of the model's weights")
    parser.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results" / "convert_memory.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-memory-") as name:
        folder = Path(name)
        weights_bytes = write_big_model(folder, size_bytes=int(arguments.gib * 2**30))
        figures = {
            name: measure(PASSES[name], folder / "big.onnx", folder / "written", weights_bytes=weights_bytes)
            for name in arguments.passes
        }
    result = {
        "question": "memory that a conversion takes, beside its model's weights",
        "weights_gib": round(weights_bytes / 2**30, 2),
        "passes": figures,
        "machine": describe_machine(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
