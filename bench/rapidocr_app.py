"""What does a real application get? Runs RapidOCR with its own options, plain and on bundles.

    python -m bench.rapidocr_app [--rounds 9] [--rebuild] [--out FILE.json]

Measures in fresh, interleaved processes: process start to the first page's result, time per page afterwards,
private memory, and whether the answers are identical. RapidOCR has its own environment. Only the class that
makes its sessions is replaced, by `load` with the `SessionOptions` that RapidOCR passes (it switches the
memory arena off).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime

from bench.models import ARTIFACTS
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import ROOT
from ortprep.bundle.figures import Samples
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import is_below, paired_ratio
from ortprep.measuring.device_lock import measuring
from ortprep.measuring.rounds import order_of_round

MODELS = ("rapidocr-det", "rapidocr-cls", "rapidocr-rec")
PLAIN, BUNDLES = "plain", "bundles"

_REQUIREMENTS = (
    SMALL_MODELS[MODELS[0]].wheel,
    "opencv-python-headless==5.0.0.93",
    f"onnxruntime=={onnxruntime.__version__}",
)

_PAGES = """\
import sys
import cv2, numpy
WORDS = "invoice total amount delivery address reference quantity payment 2026 31.40".split()
for index, (height, width, lines) in enumerate([(736, 736, 4), (736, 1000, 6), (900, 740, 9)]):
    page = numpy.full((height, width, 3), 255, numpy.uint8)
    for line in range(lines):
        words = [WORDS[(index + 3 * line + word * word) % len(WORDS)] for word in range(3)]
        place = (40, 60 + line * (height - 80) // lines)
        cv2.putText(page, " ".join(words), place, cv2.FONT_HERSHEY_SIMPLEX, 1.0, (20, 20, 20), 2, cv2.LINE_AA)
    cv2.imwrite(f"{sys.argv[1]}/page{index}.png", page)
"""

_APPLICATION = """\
import json, sys, time
from rapidocr import RapidOCR
request = json.loads(sys.argv[1])
if request["bundles"]:
    import rapidocr.inference_engine.onnxruntime.main as engine
    from ortprep.runtime import load

    def make_session(path, sess_options=None, providers=None):
        return load(request["bundles"][path.rpartition("/")[2]], session_options=sess_options)

    engine.InferenceSession = make_session
ocr = RapidOCR(params={"Global.log_level": "critical"})
ocr(request["pages"][0])
first = time.monotonic()
times = []
for page in request["pages"] * request["repeats"]:
    began = time.monotonic()
    ocr(page)
    times.append(time.monotonic() - began)
with open("/proc/self/smaps_rollup") as rollup:
    private_kb = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
answers = []
for page in request["pages"]:
    found = ocr(page)
    answers.append([found.boxes.tolist(), list(found.txts), [float(score) for score in found.scores]])
seconds_per_page = sum(times) / len(times)
print(json.dumps({"first": first, "page": seconds_per_page, "private_kb": private_kb, "answers": answers}))
"""


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment with RapidOCR and this ONNX Runtime if need be; returns its interpreter.

    Raises:
        StageError: pip failed.
    """
    python = folder / "bin" / "python"
    ready = folder / "ready.txt"
    if not ready.exists() or ready.read_text() != "\n".join(_REQUIREMENTS):
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *_REQUIREMENTS]
        if subprocess.run(command, check=False).returncode:
            raise StageError("cannot install RapidOCR", hint=" ".join(command))
        ready.write_text("\n".join(_REQUIREMENTS))
    return python


def run_application(python: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs RapidOCR in a fresh process.

    Args:
        python: Its interpreter.
        request: `bundles`, folders by file name of the model, empty for plain ONNX Runtime; `pages`, images;
            `repeats`, how often each is read after the first result.

    Returns:
        `first_ms` from before the process was started to the first result, `page_ms`, `private_mb` after
        that, and `answers`: boxes, texts and scores of every page.

    Raises:
        StageError: It failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    command = [str(python), "-c", _APPLICATION, json.dumps(request)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise StageError(f"RapidOCR failed\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "first_ms": (found["first"] - started) * 1e3,
        "page_ms": found["page"] * 1e3,
        "private_mb": found["private_kb"] / 1024,
        "answers": found["answers"],
    }


def compare(python: Path, bundles: Mapping[str, Path], *, rounds: int, repeats: int) -> dict[str, Any]:
    """Measures RapidOCR both ways, interleaved, and returns figures and verdicts as JSON types."""
    results: dict[str, list[dict[str, Any]]] = {PLAIN: [], BUNDLES: []}
    with TemporaryDirectory(prefix="pages-") as folder, measuring("cpu"):
        subprocess.run([str(python), "-c", _PAGES, folder], check=True)
        files = {Path(SMALL_MODELS[name].member).name: str(bundle) for name, bundle in bundles.items()}
        request = {"pages": sorted(str(page) for page in Path(folder).iterdir()), "repeats": repeats}
        requests = {PLAIN: {**request, "bundles": {}}, BUNDLES: {**request, "bundles": files}}
        for arm in requests:  # fills the page cache and the memory of digests; not counted
            run_application(python, requests[arm])
        for index in range(rounds):
            for arm in order_of_round(tuple(requests), index):
                results[arm].append(run_application(python, requests[arm]))
    return report(results)


def report(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the figures of both ways, their ratios, and whether each goal is reached.

    Args:
        results: What `run_application` returned, by way; the k-th of both are of the same round.
    """
    figures: dict[str, Any] = {}
    reached = {
        "answers identical": len({json.dumps(r["answers"]) for of in results.values() for r in of}) == 1
    }
    for name in ("first_ms", "page_ms", "private_mb"):
        plain, bundles = ([one[name] for one in results[arm]] for arm in (PLAIN, BUNDLES))
        ratio = paired_ratio(bundles, plain)
        figures[name] = {
            PLAIN: Samples.of(plain).statistics(),
            BUNDLES: Samples.of(bundles).statistics(),
            "bundles_to_plain": ratio,
        }
        # Memory varies little; times are no worse if no difference is seen beyond the noise.
        reached[f"{name} no worse"] = ratio <= 1.0 or (name != "private_mb" and not is_below(plain, bundles))
    return {"figures": figures, "reached": reached}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rapidocr_app",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, choices=range(3, 100), metavar="N")
    parser.add_argument("--repeats", type=int, default=2, help="how often each page is read in a process")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS)
    parser.add_argument("--rebuild", action="store_true", help="prepare again whatever is not up to date")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    artifacts = options.artifacts.absolute()
    try:
        python = make_environment(artifacts / "rapidocr-environment")
        models = prepare_small_models(MODELS, artifacts / "small", reuse=not options.rebuild)
        bundles = {model.name: model.bundle for model in models}
        found = compare(python, bundles, rounds=options.rounds, repeats=options.repeats)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    document = {"packages": _REQUIREMENTS, "rounds": options.rounds, "machine": describe_machine(), **found}
    if options.out:
        options.out.write_text(format_results(document) + "\n", encoding="utf-8")
    for name, figures in found["figures"].items():
        plain, bundled = (figures[arm]["median"] for arm in (PLAIN, BUNDLES))
        print(f"{name:<11} plain {plain:8.1f}  bundles {bundled:8.1f}  {figures['bundles_to_plain']:.3f}×")
    for goal, is_reached in found["reached"].items():
        print(f"{'reached' if is_reached else 'MISSED '}  {goal}")
    return 0 if all(found["reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
