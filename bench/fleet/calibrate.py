"""Measures the inputs of the simulation: `python -m bench.fleet.calibrate ARTIFACTS --tuned ARTIFACTS`.

Reads the receipts of real builds (`ortprep prepare --artifacts ARTIFACTS`, on an idle machine, since a
receipt's time includes waiting for a device), and counts the requests of real publishes. A stage's time is a
line over the size of the source. Searches come from builds of their own, everything else from builds without
one; `bench.big_model` adds its two.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np

from bench.fleet.calibration import CALIBRATION, RESULTS, Calibration, StageCost, write_calibration
from bench.fleet.counting import count_all, fit_requests, time_publish
from bench.machine import describe_machine
from ortprep.graph.receipts import WORK_FOLDER, TaskReceipt, read_receipt

MB = 1e6
CALL_S = 0.02
Counted = Mapping[str, Mapping[str, Sequence[Mapping[str, int]]]]
_BIG = re.compile(r"done (\w+):big(?:/(\w+))? \(([\d.]+) s\)")
MORE_ROUNDS = (5 + 2) / (3 + 1)
"""Rounds, warm and cold, that `configs/defaults.yaml` measures for each of `bench.big_model`'s."""

EXCLUSIVE = ("tune", "measure")
SMALL_FILES = 8
"""Files of a publish that are not weights: records, manifests, descriptions; a few KB each."""


@dataclass(frozen=True)
class Seen:
    """One stage of one real build.

    Attributes:
        model: Its name.
        task: As `StageCost.task`.
        source_mb: Size of the model.
        elapsed_s: How long it took.
        new_mb: Bytes that no stage before it left.
        files: How many files with such bytes.
    """

    model: str
    task: str
    source_mb: float
    elapsed_s: float
    new_mb: float
    files: int


def read_builds(folders: Iterable[Path]) -> tuple[Seen, ...]:
    """Returns every stage of every build below these artifacts folders."""
    return tuple(
        seen
        for folder in folders
        for model in sorted((folder / WORK_FOLDER).iterdir())
        for seen in _read_model(model)
    )


def _read_model(folder: Path) -> list[Seen]:
    found = (read_receipt(path) for path in (folder / "receipts").glob("*.json"))
    receipts = sorted((one for one in found if one is not None), key=lambda one: one.finished_at)
    source_mb = sum(file.size_bytes for one in receipts if one.task == "fetch" for file in one.files) / MB
    known: set[str] = set()
    seen = []
    for receipt in receipts:
        new = [file for file in receipt.files if file.sha256 not in known]
        known |= {file.sha256 for file in receipt.files}
        new_mb = sum(file.size_bytes for file in new) / MB
        seen.append(Seen(folder.name, _task(receipt), source_mb, receipt.elapsed_s, new_mb, len(new)))
    return seen


def _task(receipt: TaskReceipt) -> str:
    stage, slash, variant = receipt.task.partition("/")
    return f"{stage}/{variant if variant == 'portable' else 'target'}" if slash else stage


def read_big_models(folder: Path) -> tuple[Seen, ...]:
    """Returns the stages of `bench.big_model`'s results; its fewer rounds of measuring count for more."""
    found = []
    for path in sorted(folder.glob("big_model_*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        mb = data["weights_gib"] * 2**30 / MB
        for line in data["stages"]:
            stage, variant, seconds = _parse_line(line)
            task = f"{stage}/{'portable' if variant == 'portable' else 'target'}" if variant else stage
            elapsed_s = float(seconds) * (MORE_ROUNDS if stage == "measure" else 1.0)
            new_mb = mb if stage in ("fetch", "optimize") else 0.0
            found.append(Seen(path.stem, task, mb, elapsed_s, new_mb, 2 if new_mb else 0))
    return tuple(found)


def _parse_line(line: str) -> tuple[str, str, str]:
    found = _BIG.fullmatch(line)
    if found is None:
        raise SystemExit(f"not a line of bench.big_model: {line!r}")
    return found[1], found[2] or "", found[3]


def fit_stages(seen: Sequence[Seen]) -> dict[str, StageCost]:
    """Returns a line for each task."""
    tasks = dict.fromkeys(one.task for one in seen)
    return {task: _fit(task, [one for one in seen if one.task == task]) for task in tasks}


def _fit(task: str, seen: list[Seen]) -> StageCost:
    sizes, times = np.array([one.source_mb for one in seen]), np.array([one.elapsed_s for one in seen])
    # By relative errors: a gigabyte must not decide what a small model takes.
    slope, base = np.polyfit(sizes, times, 1, w=1 / times).clip(min=0.0) if len(seen) > 1 else (0.0, times[0])
    factor = float(np.mean(times / (base + slope * sizes)))
    base, slope = factor * float(base), factor * float(slope)
    return StageCost(
        task=task,
        is_exclusive=task.split("/")[0] in EXCLUSIVE,
        base_s=round(base, 3),
        per_mb_s=round(slope, 5),
        spread=round(float(np.std(np.log(times / (base + slope * sizes)))), 3),
        new_per_mb=round(sum(one.new_mb for one in seen) / float(sizes.sum()), 4),
        files=round(median(one.files for one in seen)),
    )


def bundle_share(folders: Iterable[Path]) -> float:
    """Returns the bytes of a bundle for each byte of its source, over all builds."""
    bundles = sources = 0
    for folder in folders:
        for model in (folder / WORK_FOLDER).iterdir():
            fetched = read_receipt(model / "receipts" / "fetch.json")
            packaged = read_receipt(model / "receipts" / "package.json")
            if fetched and packaged:
                sources += sum(file.size_bytes for file in fetched.files)
                bundles += sum(file.size_bytes for file in packaged.files)
    return round(bundles / sources, 3)


def fit_sizes(seen: Sequence[Seen]) -> tuple[float, float]:
    """Returns median in MB and sigma of the log-normal distribution of the models' sizes."""
    logs = [math.log(size) for size in {one.model: one.source_mb for one in seen}.values()]
    return math.exp(fmean(logs)), pstdev(logs)


def calibrate(plain: Path, tuned: Path, counted: Counted) -> Calibration:
    """Returns the figures of builds without and with a search, and of counted publishes."""
    usual = read_builds([plain])
    searches = tuple(one for one in read_builds([tuned]) if one.task.startswith("tune"))
    seen = (*usual, *read_big_models(RESULTS), *searches)
    stages = fit_stages(seen)
    sizes_mb = {one.model: one.source_mb for one in usual}
    median_mb, sigma = fit_sizes(usual)
    order = ("optimize", "verify", "tune", "measure", "package")
    job = [
        stages[task]
        for stage in order
        for task in (stage, f"{stage}/target", f"{stage}/portable")
        if task in stages
    ]
    floor_s = round(time_publish(CALL_S), 2)
    publish = StageCost("publish", False, 0.0, 0.0, 0.0, bundle_share([plain]), SMALL_FILES)
    return Calibration(
        machine=describe_machine(),
        median_mb=round(median_mb, 1),
        sigma=round(sigma, 2),
        smallest_mb=round(min(sizes_mb.values()), 1),
        largest_mb=7 * 2**30 / MB,
        fetch=stages["fetch"],
        stages=(*job, publish),
        registries={kind: fit_requests(one["in_turn"], one["at_once"]) for kind, one in counted.items()},
        publish_floor_s=floor_s,
        observed={
            "stages": [
                {"model": one.model, "task": one.task, "mb": round(one.source_mb, 1), "s": one.elapsed_s}
                for one in seen
            ],
            "publishes": counted,
            "largest": "bench/results/big_model_7gib.json: 7 GiB of weights on 24 GB",
        },
    )


def main() -> None:
    """Reads, counts and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", type=Path, help="Folder that models were prepared into.")
    parser.add_argument("--tuned", type=Path, required=True, help="Another, with searches.")
    parser.add_argument("--out", type=Path, default=CALIBRATION)
    arguments = parser.parse_args()
    found = calibrate(arguments.artifacts, arguments.tuned, count_all())
    write_calibration(arguments.out, found)
    for cost in (found.fetch, *found.stages):
        print(f"{cost.task:20} {cost.base_s:8.1f} s + {cost.per_mb_s:.4f} s/MB, ± {cost.spread:.2f}")
    print(f"sizes: median {found.median_mb} MB, sigma {found.sigma}")


if __name__ == "__main__":
    main()
