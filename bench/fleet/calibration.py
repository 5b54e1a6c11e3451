"""The measured inputs of the simulation; `python -m bench.fleet.calibrate` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode

RESULTS = Path(__file__).resolve().parents[1] / "results"
CALIBRATION = RESULTS / "fleet_calibration.json"


@dataclass(frozen=True)
class StageCost:
    """How long a stage takes and what it leaves, by the size of its model: a line through real builds.

    Attributes:
        task: `STAGE` or `STAGE/VARIANT`; the variant is `target` or `portable`.
        is_exclusive: Whether it has its device alone.
        base_s: Seconds for a model without weights.
        per_mb_s: Seconds more for each MB (10^6 bytes) of the source.
        spread: Standard deviation of the logarithm of a build's time around the line.
        new_per_mb: MB of files with new bytes that it leaves, for each MB of the source.
        files: How many files with new bytes.
    """

    task: str
    is_exclusive: bool
    base_s: float
    per_mb_s: float
    spread: float
    new_per_mb: float
    files: int


@dataclass(frozen=True)
class RequestCost:
    """Requests of one kind that one publish makes.

    Attributes:
        base: With nothing of that model there before.
        per_part: More for each part that the registry has of the model, with a cold cache.
        per_rival: More for each other machine that publishes the same model at the same time.
    """

    base: float
    per_part: float
    per_rival: float


@dataclass(frozen=True)
class Calibration:
    """Everything the simulation takes from measurements.

    Attributes:
        machine: Where they were made.
        median_mb: Median size of a model, in MB.
        sigma: Standard deviation of the logarithm of a model's size.
        smallest_mb: Of the models the sizes were fitted to.
        largest_mb: Of those that were built here at all.
        fetch: What fetching costs.
        stages: What each stage of a job costs, in order; the last one publishes.
        registries: Requests of a publish by kind of request, by kind of registry.
        publish_floor_s: Seconds a publish takes where every call takes 20 ms and no limit is met.
        observed: The raw figures.
    """

    machine: Mapping[str, Any]
    median_mb: float
    sigma: float
    smallest_mb: float
    largest_mb: float
    fetch: StageCost
    stages: tuple[StageCost, ...]
    registries: Mapping[str, Mapping[str, RequestCost]]
    publish_floor_s: float
    observed: Mapping[str, Any]


def read_calibration(path: Path = CALIBRATION) -> Calibration:
    """Returns the measured figures."""
    return decode(Calibration, json.loads(path.read_text(encoding="utf-8")))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the measured figures."""
    path.write_text(json.dumps(encode(calibration), indent=1) + "\n", encoding="utf-8")
