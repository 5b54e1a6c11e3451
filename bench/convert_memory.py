"""How much memory does a conversion take? `python -m bench.convert_memory [--gib 2.5] [--pass fp16 ...]`.

Generates a chain of MatMul + Relu with its weights in external data, and runs each pass over it in a child
process. Reports the child's largest resident set (ru_maxrss, mapped pages included) beside the model's size.
To measure another pass, add its name to `PASSES`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.big_model import write_big_model
from bench.result_file import describe_machine, format_results
from ortprep.children.child import run_child
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.passes import change_graph

_ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 3600.0


PASSES = ("fp16", "bf16", "int4-weights", "int8-weights", "int8-dynamic")


def measure(name: str, source: Path, folder: Path, *, weights_bytes: int) -> dict[str, Any]:
    """Runs one pass into a folder of its own, which is removed, and returns the figures."""
    folder.mkdir()
    try:
        request = PassRequest(source=source, written=folder / source.name, name=name)
        reply = run_child(change_graph, request, timeout_s=_TIMEOUT_S)
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
    parser.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results" / "convert_memory.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-memory-") as name:
        folder = Path(name)
        weights_bytes = write_big_model(folder, size_bytes=int(arguments.gib * 2**30))
        figures = {
            name: measure(name, folder / "big.onnx", folder / "written", weights_bytes=weights_bytes)
            for name in arguments.passes
        }
    result = {
        "question": "memory that a conversion takes, beside its model's weights",
        "weights_gib": round(weights_bytes / 2**30, 2),
        "passes": figures,
        "machine": describe_machine(),
    }
    arguments.out.write_text(format_results(result) + "\n")
    print(format_results(result))


if __name__ == "__main__":
    main()
