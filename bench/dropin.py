"""What do applications gain that know nothing of bundles? Runs them unchanged, plainly and by `ortprep run`.

    python -m bench.dropin [APPLICATION]... [--rounds 7] [--rebuild] [--out FILE.json]

Each application is a package that ships its models, and makes its sessions itself. Measures in fresh,
interleaved processes: from before the process starts to the first result, the whole process, time per later
call, and whether the answers agree. Three ways: `plain`; `run`, by the command `ortprep run`; `variables`,
with what `ortprep run --print-environment` writes set beforehand, as a Dockerfile does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from bench.models import ARTIFACTS
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import ROOT
from ortprep.bundle.figures import Samples
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import order_of_round, paired_ratio, ratio_interval
from ortprep.measuring.device_lock import measuring

PLAIN, RUN, VARIABLES = "plain", "run", "variables"
FIGURES = ("first_ms", "whole_ms", "call_ms")

_DEFAULTS = "targets: [cpu]\ntune: {max_trials: 0}\n"
"""Bundles are measured as a user's are, but without a search."""

_MAX_RELATIVE_ERROR = 1e-3
"""Largest relative difference between two answers of one number that still agree, as of a spec's gate."""


@dataclass(frozen=True)
class Application:
    """A package, used as its README says.

    Attributes:
        models: What it loads, by names of `SMALL_MODELS`.
        code: Defines `call`, which returns an answer as JSON types; runs once.
        calls: How often it is called after the first result.
    """

    models: tuple[str, ...]
    code: str
    calls: int


_PAGE = """
import cv2, numpy
page = numpy.full((736, 1000, 3), 255, numpy.uint8)
for line in range(6):
    cv2.putText(page, f"invoice {line} total 31.4{line}", (40, 90 + 110 * line), 0, 1.5, (20, 20, 20), 2)
"""

APPLICATIONS = {
    "rapidocr": Application(
        ("rapidocr-det", "rapidocr-cls", "rapidocr-rec"),
        _PAGE
        + """
from rapidocr import RapidOCR
ocr = RapidOCR(params={"Global.log_level": "critical"})
def call():
    found = ocr(page)
    return [found.boxes.tolist(), list(found.txts), [float(score) for score in found.scores]]
""",
        calls=3,
    ),
    "magika": Application(
        ("magika",),
        """
from magika import Magika
magika = Magika()
text = b"def main(argv):\\n    import sys\\n    return len(argv)\\n" * 40
def call():
    found = magika.identify_bytes(text)
    return [str(found.output.label), float(found.score)]
""",
        calls=50,
    ),
    "silero-vad": Application(
        ("silero-vad",),
        """
import torch
from silero_vad import get_speech_timestamps, load_silero_vad
model = load_silero_vad(onnx=True)
wave = torch.sin(torch.arange(32000) * 0.05) * torch.rand(32000, generator=torch.Generator().manual_seed(1))
def call():
    model.reset_states()
    found = [float(model(wave[start:start + 512], 16000)) for start in range(0, 31744, 512)]
    return [found, get_speech_timestamps(wave, model)]
""",
        calls=5,
    ),
    "ddddocr": Application(
        ("ddddocr-old",),
        _PAGE
        + """
import ddddocr
ocr = ddddocr.DdddOcr(show_ad=False)
image = cv2.imencode(".png", page[40:120, 30:330])[1].tobytes()
def call():
    return ocr.classification(image)
""",
        calls=20,
    ),
    "nudenet": Application(
        ("nudenet",),
        _PAGE
        + """
from nudenet import NudeDetector
detector = NudeDetector()
def call():
    return detector.detect(page)
""",
        calls=10,
    ),
}
"""The applications by name."""

_SCRIPT = """
{code}
answer = call()
import json, time
first, times = time.monotonic(), []
for _ in range({calls}):
    began = time.monotonic()
    call()
    times.append(time.monotonic() - began)
print(json.dumps([first, sorted(times)[len(times) // 2], answer]))
"""

_REQUIREMENTS = (
    *dict.fromkeys(SMALL_MODELS[name].wheel for app in APPLICATIONS.values() for name in app.models),
    "opencv-python-headless==5.0.0.93",
    f"onnxruntime=={onnxruntime.__version__}",
    "torch",  # of silero-vad
    str(ROOT),
)


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment with the applications and this project if need be; returns its `bin`.

    Raises:
        StageError: pip failed.
    """
    ready = folder / "ready.txt"
    if not ready.exists() or ready.read_text() != "\n".join(_REQUIREMENTS):
        venv.create(folder, with_pip=True, clear=True, upgrade_deps=True)
        command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *_REQUIREMENTS]
        if subprocess.run(command, check=False).returncode:
            raise StageError("cannot install the applications", hint=" ".join(command))
        ready.write_text("\n".join(_REQUIREMENTS))
    return folder / "bin"


def make_commands(application: Application, programs: Path, bundles: Path) -> dict[str, list[str]]:
    """Returns the command of each way to run an application."""
    script = _SCRIPT.format(code=application.code, calls=application.calls)
    plain = [str(programs / "python"), "-c", script]
    run = [str(programs / "ortprep"), "run", "--bundles", str(bundles)]
    shown = subprocess.run([*run, "--print-environment"], check=True, capture_output=True, text=True)
    return {
        PLAIN: plain,
        RUN: [*run, "--", *plain],
        VARIABLES: ["env", *shown.stdout.split("\n")[:-1], *plain],
    }


def run_application(command: Sequence[str]) -> dict[str, Any]:
    """Runs an application in a fresh process; returns the figures, in ms, and its first answer.

    Raises:
        StageError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    ended = time.monotonic()
    if done.returncode:
        raise StageError(f"an application failed\n{done.stderr[-2000:]}")
    first, call, answer = json.loads(done.stdout.splitlines()[-1])
    times = ((first - started) * 1e3, (ended - started) * 1e3, call * 1e3)
    return {**dict(zip(FIGURES, times, strict=True)), "answer": answer}


def compare(commands: Mapping[str, Sequence[str]], *, rounds: int) -> dict[str, Any]:
    """Measures an application in every way, interleaved; returns figures and verdicts as JSON types."""
    for command in commands.values():  # fills the page cache and what is remembered of files; not counted
        run_application(command)
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in commands}
    for index in range(rounds):
        for way in order_of_round(tuple(commands), index):
            results[way].append(run_application(commands[way]))
    return report(results)


def report(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the figures of each way, their ratio to plain, give or take two standard errors, and a verdict.

    Args:
        results: What `run_application` returned, by way; the k-th of all are of the same round.
    """
    answers = [one["answer"] for of in results.values() for one in of]
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = {way: [one[name] for one in of] for way, of in results.items()}
        plain = values[PLAIN]
        figures[name] = {way: Samples.of(of).statistics() for way, of in values.items()}
        for way in (RUN, VARIABLES):
            figures[name][way]["to_plain"] = paired_ratio(values[way], plain)
            figures[name][way]["interval"] = interval = ratio_interval(values[way], plain, errors=2)
            figures[name][way]["verdict"] = judge(*interval)
    return {"answers_agree": all(agrees(answers[0], other) for other in answers), "figures": figures}


def judge(low: float, high: float) -> str:
    """Returns `better`, `worse` or `no difference`, by the interval in which the ratio to plain is."""
    if high < 1:
        return "better"
    return "worse" if low > 1 else "no difference"


def agrees(one: Any, other: Any) -> bool:
    """Says whether two answers, of JSON types, are the same but for rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agrees, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agrees(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_MAX_RELATIVE_ERROR, abs_tol=1e-5)
    return bool(one == other)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if an answer differs or something is worse."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dropin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="APPLICATION", choices=[*APPLICATIONS, []])
    parser.add_argument("--rounds", type=int, default=7, choices=range(3, 100), metavar="N")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS)
    parser.add_argument("--rebuild", action="store_true", help="prepare again whatever is not up to date")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    artifacts, names = options.artifacts.absolute(), options.names or list(APPLICATIONS)
    models = [model for name in names for model in APPLICATIONS[name].models]
    try:
        programs = make_environment(artifacts / "dropin-environment")
        prepare_small_models(models, artifacts / "dropin", defaults=_DEFAULTS, reuse=not options.rebuild)
        with measuring("cpu"):
            found = {
                name: compare(
                    make_commands(APPLICATIONS[name], programs, artifacts / "dropin"), rounds=options.rounds
                )
                for name in names
            }
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    document = {
        "packages": _REQUIREMENTS[:-1],
        "rounds": options.rounds,
        "machine": describe_machine(),
        "applications": found,
    }
    if options.out:
        options.out.write_text(format_results(document) + "\n", encoding="utf-8")
    return 1 if print_table(found) else 0


def format_interval(figures: Mapping[str, Any]) -> str:
    """Returns a ratio to plain, its interval and what that means, as text."""
    low, high = figures["interval"]
    return f"{figures['to_plain']:.2f}× [{low:.2f}–{high:.2f}], {figures['verdict']}"


def print_table(found: Mapping[str, Any]) -> bool:
    """Prints the figures, and returns whether an answer differs or something is worse."""
    is_bad = False
    for name, one in found.items():
        print(f"{name}: answers {'agree' if one['answers_agree'] else 'DIFFER'}")
        is_bad |= not one["answers_agree"]
        for figure, ways in one["figures"].items():
            shown = [
                f"{way} {ways[way]['median']:8.1f} ({format_interval(ways[way])})" for way in (RUN, VARIABLES)
            ]
            print(f"  {figure:<9} plain {ways[PLAIN]['median']:8.1f}  {'  '.join(shown)}")
            is_bad |= any(ways[way]["verdict"] == "worse" for way in (RUN, VARIABLES))
    return is_bad


if __name__ == "__main__":
    sys.exit(main())
