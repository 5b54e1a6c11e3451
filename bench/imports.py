"""What does a start pay for packages without compiled bytecode? `python -m bench.imports [--rounds 15]`.

Two virtual environments with the same numpy and ONNX Runtime: *compiled* as pip leaves them, *not compiled*
as `pip install --no-compile` or `uv pip install` does. Fresh processes in turns run Silero VAD by plain ONNX
Runtime, and may not write bytecode, as in an image with `PYTHONDONTWRITEBYTECODE=1` or a read-only root. All
figures are from the start of the process to its first result, with a warm page cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.models import ARTIFACTS
from bench.result_file import describe_machine, format_results
from bench.small_models import prepare_small_models
from bench.start import plain, run_script, write_script
from ortprep.bundle.figures import Samples
from ortprep.measuring.comparison import order_of_round, paired_ratio
from ortprep.measuring.device_lock import measuring

ARMS = {"compiled": [], "not compiled": ["--no-compile"]}
"""What pip gets in each environment."""


def make_environment(folder: Path, options: Sequence[str]) -> Path:
    """Makes an environment with this process's numpy and ONNX Runtime; returns its interpreter."""
    venv.create(folder, with_pip=True)
    wheels = [f"numpy=={version('numpy')}", f"onnxruntime=={_runtime_version()}"]
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *options, *wheels], check=True)
    return python


def _runtime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    (model,) = prepare_small_models(["silero-vad"], (ARTIFACTS / "small").absolute(), reuse=True)
    ready: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with TemporaryDirectory(prefix="imports-") as name, measuring("cpu"):
        folder = Path(name)
        script = folder / "script.py"
        write_script(plain(model.source), model.sample, script, steady_s=0)
        pythons = {arm: make_environment(folder / arm, more) for arm, more in ARMS.items()}
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for index in range(-1, options.rounds):  # the first fills the page cache
            for arm in order_of_round(tuple(ARMS), index):
                ready[arm].append(run_script(script, python=pythons[arm]).ready_ms)
    counted = {arm: found[1:] for arm, found in ready.items()}
    sooner = round(paired_ratio(counted["not compiled"], counted["compiled"]), 2)
    medians = {arm: f"{median(found):.0f} ms" for arm, found in counted.items()}
    print(f"{medians}: the first result is {sooner} times sooner with bytecode")
    if options.out is not None:
        figures = {arm: Samples.of(found).statistics() for arm, found in counted.items()}
        report = {
            "machine": describe_machine(),
            "rounds": options.rounds,
            "sooner": sooner,
            "ready_ms": figures,
        }
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
