"""What does int8 that an application judges bring? Packages of PyPI, unmodified, by a user's commands.

    python -m bench.precision [NAME...] [--rounds 5] [--folder DIR] [--out FILE.json]

Adopts and prepares each application of `bench.applications`, then measures it on inputs that neither
calibrated nor judged. Fresh processes, in turns: plain, the bundles in fp32, and the bundles as they ship. It
says whether the answers are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import onnxruntime

from bench.applications import APPLICATIONS
from bench.result_file import describe_machine, format_results
from bench.start import ROOT
from ortprep.bundle.manifest import Manifest, VariantRecord, read_manifest
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import order_of_round, paired_ratio
from ortprep.runtime.machine.hardware import read_hardware

ARMS = {"plain": None, "fp32": "fp32", "judged": ""}
"""The ways to run an application: without bundles, or with them and this `ORTPREP_PRECISION`."""

PROGRAM = ROOT / "bench" / "applications.py"
RAPIDOCR_GOAL, STEADY_GOAL = 1.45, 1.5

DEFAULTS = """\
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 0, steady_s: 0.1}
"""


def make_environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Makes a virtual environment with a package and this ONNX Runtime; returns its interpreter.

    Raises:
        StageError: pip failed.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    run([*command, f"onnxruntime=={onnxruntime.__version__}"], folder)
    return python


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Runs a command and returns what it writes to stdout.

    Raises:
        StageError: It failed.
    """
    done = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        raise StageError(f"failed: {' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def prepare(name: str, python: Path, folder: Path) -> dict[str, Any]:
    """Adopts and prepares an application in a folder; returns how long that took, and what was decided."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "defaults.yaml").write_text(DEFAULTS)
    program, ortprep = [str(python), str(PROGRAM)], [sys.executable, "-m", "ortprep"]
    run([*program, "draw", name, "judged", "1", str(APPLICATIONS[name].judged)], folder)
    began = time.monotonic()
    adopt = ["adopt", "--precision", "auto", "--record-inputs", "32", "--judge", "stdout", "--"]
    run([*ortprep, *adopt, *program, "run", name, "judged"], folder)
    adopted = time.monotonic()
    run([*ortprep, "prepare"], folder)
    prepared = time.monotonic()
    bundles = sorted(path.parent for path in (folder / "artifacts").glob("*/manifest.json"))
    models = {bundle.name: describe(read_manifest(bundle)) for bundle in bundles}
    return {"adopt_s": adopted - began, "prepare_s": prepared - adopted, "models": models}


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns what a bundle ships in int8: verdict, and how many times faster than default ONNX Runtime."""
    int8 = next((one for one in manifest.variants if one.name == "cpu-int8"), None)
    verdict = int8.conversion.verdict if int8 and int8.conversion else None
    return {
        "variants": [one.name for one in manifest.variants],
        "verdict": None if verdict is None else str(verdict),
        "left_out": {one.variant: one.reason for one in manifest.left_out},
        "steady_faster": None if int8 is None else _steady_faster(int8),
    }


def _steady_faster(variant: VariantRecord) -> float:
    plans = {plan.plan: plan for plan in variant.measurements[0].plans}
    return plans["default"].steady_ms.median / plans["prepared"].steady_ms.median


def measure(name: str, python: Path, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Runs an application in every way, in turns, and returns times per input, ratios and agreement."""
    run([str(python), str(PROGRAM), "draw", name, "others", "7", str(APPLICATIONS[name].held_out)], folder)
    input_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    whole_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    answers: dict[str, set[str]] = {arm: set() for arm in ARMS}
    for index in range(rounds):
        for arm in order_of_round(tuple(ARMS), index):
            began = time.monotonic()
            answers[arm].add(_run_arm(name, python, folder, ARMS[arm]))
            whole_s[arm].append(time.monotonic() - began)
            input_ms[arm].append(1e3 * statistics.fmean(json.loads((folder / "times.json").read_text())))
    plain = min(answers["plain"]).splitlines()
    return {
        "input_ms": input_ms,
        "whole_s": whole_s,
        "faster_per_input": {arm: 1 / paired_ratio(input_ms[arm], input_ms["plain"]) for arm in ARMS},
        "lines": len(plain),
        "equal_lines": {
            arm: sum(a == b for a, b in zip(plain, min(answers[arm]).splitlines(), strict=False))
            for arm in ARMS
        },
        "equal_lines_in_any_order": {
            arm: (Counter(plain) & Counter(min(answers[arm]).splitlines())).total() for arm in ARMS
        },
        "identical": all(len(one) == 1 and one == answers["plain"] for one in answers.values()),
    }


def _run_arm(name: str, python: Path, folder: Path, precision: str | None) -> str:
    command = [str(python), str(PROGRAM), "run", name, "others", "times.json"]
    if precision is None:
        return run(command, folder)
    return run([sys.executable, "-m", "ortprep", "run", "--", *command], folder, ORTPREP_PRECISION=precision)


def judge(applications: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Returns whether each goal is reached."""
    models = [model for one in applications.values() for model in one["models"].values()]
    steady = [model["steady_faster"] for model in models if model["steady_faster"] is not None]
    reached = {f"{name}: same answers": one["identical"] for name, one in applications.items()}
    if "rapidocr" in applications:
        faster = applications["rapidocr"]["faster_per_input"]["judged"]
        reached[f"rapidocr: {RAPIDOCR_GOAL} times faster per page"] = faster >= RAPIDOCR_GOAL
    if steady:
        mean = statistics.geometric_mean(steady)
        reached[f"int8 models: {STEADY_GOAL} times faster runs, geometric mean"] = mean >= STEADY_GOAL
        reached["no int8 model ships that is slower than fp32"] = min(steady) >= 1
    return reached


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="applications; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a new folder to work in; a temporary one by default")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(mkdtemp(prefix="precision-"))).absolute()
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in options.names or APPLICATIONS:
            python = make_environment(folder / f"{name}-environment", APPLICATIONS[name].requirements)
            built = prepare(name, python, folder / name)
            found[name] = {**built, **measure(name, python, folder / name, rounds=options.rounds)}
            print(f"{name}: {format_results(found[name])}", file=sys.stderr)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    features = [one for one in read_hardware(gpus=False).cpu_features if "vnni" in one or "amx" in one]
    document: Mapping[str, Any] = {
        "machine": describe_machine(),
        "integer_instructions": features,
        "load_average": os.getloadavg(),
        "applications": found,
        "reached": judge(found),
    }
    text = format_results(document)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(document["reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
