"""What does int8 that an application judges bring? RapidOCR unmodified, by the three commands a user types.

    python -m bench.precision [--rounds 5] [--folder DIR] [--out FILE.json]

Adopts and prepares `examples/same_answers`, then measures it on twenty pages that neither calibrated nor
judged: three layouts, two sizes of letters, two fonts, some noisy or turned. Fresh processes, in turns:
plain, the bundles in fp32, and the bundles as they ship. It says whether the text is the same.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.rapidocr_app import make_environment
from bench.result_file import describe_machine, format_results
from bench.start import ROOT
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import paired_ratio
from ortprep.measuring.rounds import order_of_round
from ortprep.runtime.machine.hardware import read_hardware

ARMS = {"plain": None, "fp32": "fp32", "judged": ""}
"""The ways to run the application: without bundles, or with them and this `ORTPREP_PRECISION`."""

PAGES, JUDGE_PAGES, GOAL = 20, 6, 1.45

_HELD_OUT = """\
import random, sys
from pathlib import Path
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from draw_documents import SIZES, WORDS
import cv2, numpy
rng, folder = random.Random(7), Path(sys.argv[1])
folder.mkdir()
for number in range(int(sys.argv[2])):
    (width, height), columns, size = SIZES[number % 3], number % 3 + 1, (22, 30)[number // 3 % 2]
    page = numpy.full((height, width, 3), 255, numpy.uint8)
    image = Image.fromarray(page)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    rows = range(40, height - 40 - size, 3 * size)
    draw_text = lambda: " ".join(rng.choice(WORDS.split()) for _ in range(4 // columns))
    texts = [[draw_text() for _ in range(columns)] for _ in rows]
    if number % 2:
        page = numpy.array(image)
        for top, row in zip(rows, texts):
            for column, text in enumerate(row):
                place, grey = (40 + column * width // columns, top + size), (20, 20, 20)
                cv2.putText(page, text, place, cv2.FONT_HERSHEY_SIMPLEX, size / 34, grey, 2, cv2.LINE_AA)
        image = Image.fromarray(page)
    else:
        for top, row in zip(rows, texts):
            for column, text in enumerate(row):
                draw.text((40 + column * width // columns, top), text, "black", font)
    if number % 5 == 3:
        noise = numpy.random.default_rng(number).normal(0, 12, (height, width, 3))
        image = Image.fromarray((numpy.array(image) + noise).clip(0, 255).astype(numpy.uint8))
    if number % 5 == 4:
        image = image.rotate(1.5, fillcolor="white")
    image.save(folder / f"{number:02}.png")
"""


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


def prepare(python: Path, folder: Path) -> dict[str, Any]:
    """Adopts and prepares the application in a folder; returns how long that took, and what was decided."""
    shutil.copytree(ROOT / "examples" / "same_answers", folder, dirs_exist_ok=True)
    ortprep = [sys.executable, "-m", "ortprep"]
    run([str(python), "draw_documents.py", "pages", "1", str(JUDGE_PAGES)], folder)
    began = time.monotonic()
    adopt = ["adopt", "--precision", "auto", "--record-inputs", "16", "--judge", "stdout", "--"]
    run([*ortprep, *adopt, str(python), "read_pages.py", "pages"], folder)
    adopted = time.monotonic()
    run([*ortprep, "prepare"], folder)
    prepared = time.monotonic()
    models = {}
    for bundle in sorted((folder / "artifacts").iterdir()):
        manifest = bundle / "manifest.json"
        if manifest.is_file():
            data = json.loads(manifest.read_text())
            verdicts = [one.get("conversion") or {} for one in data["variants"]]
            models[bundle.name] = {
                "variants": [one["name"] for one in data["variants"]],
                "verdict": next((one["verdict"] for one in verdicts if one.get("verdict")), None),
                "left_out": {one["variant"]: one["reason"] for one in data["left_out"]},
            }
    return {"adopt_s": adopted - began, "prepare_s": prepared - adopted, "models": models}


def measure(python: Path, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Runs the application in every way, in turns, and returns times per page, ratios and agreement."""
    (folder / "held_out.py").write_text(_HELD_OUT)
    run([str(python), "held_out.py", "others", str(PAGES)], folder)
    pages_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    whole_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    texts: dict[str, set[str]] = {arm: set() for arm in ARMS}
    for index in range(rounds):
        for arm in order_of_round(tuple(ARMS), index):
            began = time.monotonic()
            texts[arm].add(_run_arm(python, folder, ARMS[arm]))
            whole_s[arm].append(time.monotonic() - began)
            pages_ms[arm].append(1e3 * statistics.fmean(json.loads((folder / "times.json").read_text())))
    plain = sorted(texts["plain"])[0].splitlines()
    same = {arm: _count_equal(plain, sorted(texts[arm])[0].splitlines()) for arm in ARMS}
    speedup = 1 / paired_ratio(pages_ms["judged"], pages_ms["plain"])
    return {
        "page_ms": pages_ms,
        "whole_s": whole_s,
        "speedup_per_page": speedup,
        "lines": len(plain),
        "equal_lines": same,
        "reached": {
            "text identical": all(len(one) == 1 and one == texts["plain"] for one in texts.values()),
            f"{GOAL} times faster per page": speedup >= GOAL,
        },
    }


def _run_arm(python: Path, folder: Path, precision: str | None) -> str:
    command = [str(python), "read_pages.py", "others", "times.json"]
    if precision is None:
        return run(command, folder)
    return run([sys.executable, "-m", "ortprep", "run", "--", *command], folder, ORTPREP_PRECISION=precision)


def _count_equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(one == other for one, other in zip(left, right, strict=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a new folder to work in; a temporary one by default")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(mkdtemp(prefix="precision-"))).absolute()
    try:
        python = make_environment(folder / "rapidocr-environment")
        built = prepare(python, folder / "application")
        found = measure(python, folder / "application", rounds=options.rounds)
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
        **built,
        **found,
    }
    text = format_results(document)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(found["reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
