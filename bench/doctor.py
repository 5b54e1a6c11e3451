"""Do the phases of a start add up? `python -m bench.doctor`.

Checks the phases on several models and, with `--python`, with other interpreters whose ONNX Runtime has
another version; these need only numpy and ONNX Runtime. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.demo_models import write_demo_model
from bench.language import LANGUAGE_MODELS, write_language_model
from bench.result_file import describe_machine, format_results
from ortprep.errors import StageError
from ortprep.init.trial_run import write_sample

MODELS = ("resnet50", "bert-base", "densenet121")
GOAL_APART = 0.10

_ROOT = Path(__file__).resolve().parents[1]
_TAKE_APART = """\
import json, sys
from pathlib import Path
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.doctor.initialisation import diagnose_initialisation
subject = DoctorModel("model", sys.argv[2], Path(sys.argv[1]))
print(json.dumps(diagnose_initialisation(subject, rounds=int(sys.argv[3])).figures["default"]))
"""


def take_apart(python: str, model: Path, sample: Path, *, rounds: int) -> dict[str, Any]:
    """Returns the figures of `doctor init` for a model, with an interpreter's ONNX Runtime."""
    command = [python, "-c", _TAKE_APART, str(model), str(sample), str(rounds)]
    figures: dict[str, Any] = json.loads(_output(command))
    return {
        "onnxruntime": figures["onnxruntime"],
        "phases_ms": figures["init_ms"],
        "measured_ms": figures["measured_init_ms"],
        "ratio": figures["init_ms"] / figures["measured_init_ms"],
        "phases": {name: round(ms, 2) for name, ms in figures["phases"].items()},
    }


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise StageError(f"bench command failed with {done.returncode}: {' '.join(command[:3])}")
    return done.stdout


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="another interpreter; repeatable")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results" / "doctor.json")
    arguments = parser.parse_args()
    starts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-doctor-") as name:
        folder = Path(name)
        for model in MODELS:
            write = write_language_model if model in LANGUAGE_MODELS else write_demo_model
            source, sample = folder / f"{model}.onnx", folder / "sample.npz"
            write(model, source)
            write_sample(source, sample, {})
            for python in (sys.executable, *arguments.python):
                found = take_apart(python, source, sample, rounds=arguments.rounds)
                starts[f"{model}, ONNX Runtime {found['onnxruntime']}"] = found
    result = {"machine": describe_machine(), "rounds": arguments.rounds, "starts": starts}
    arguments.out.write_text(format_results(result) + "\n", encoding="utf-8")
    print("| start | phases ms | measured ms | ratio |\n|---|---|---|---|")
    for title, one in starts.items():
        reached = abs(one["ratio"] - 1) <= GOAL_APART
        figures = f"{one['phases_ms']:.0f} | {one['measured_ms']:.0f} | {one['ratio']:.3f}"
        print(f"| {title} | {figures}{'' if reached else ' (goal: within 10 %)'} |")


if __name__ == "__main__":
    main()
