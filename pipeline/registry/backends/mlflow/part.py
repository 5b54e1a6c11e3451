"""A part as MLflow's users see it: tags, parameters and metrics of its run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pipeline.bundle.codec import decode, parse_json
from pipeline.bundle.digest import PREFIX
from pipeline.bundle.manifest import Manifest, MeasurementRecord, VariantRecord
from pipeline.errors import BundleError
from pipeline.registry.records import PartRecord

log = logging.getLogger(__name__)

DEFAULT_PLAN = "default"
FIGURES = ("ready_ms", "init_ms", "first_ms", "first_result_ms", "steady_ms", "private_mb")

_MOST_METRICS = 1000
_MOST_TEXT = 5000


def run_name(part: PartRecord, digest: str) -> str:
    """Returns what a part's run is called: its targets and the first digits of its digest."""
    return f"{_join(variant.target for variant in part.variants)} {digest.removeprefix(PREFIX)[:12]}"


def part_tags(part: PartRecord) -> dict[str, str]:
    """Returns the tags of a part's run, beside those it is found by."""
    return {
        "ortprep.model": part.model,
        "ortprep.source": part.source,
        "ortprep.spec": part.spec,
        "ortprep.created_at": part.created_at,
        "ortprep.targets": _join(variant.target for variant in part.variants),
        "ortprep.onnxruntime": _join(variant.onnxruntime for variant in part.variants),
        "ortprep.providers": _join(name for variant in part.variants for name in variant.providers),
        "ortprep.hardware": _join(variant.hardware for variant in part.variants),
    }


def _join(texts: Any) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))[:_MOST_TEXT]


def build_batch(part: PartRecord, manifest: bytes | None) -> dict[str, list[Any]]:
    """Returns what `MlflowClient.log_batch` takes: what a part's manifest says, in MLflow's terms.

    Args:
        part: The part.
        manifest: Its `manifest.json`, None if it has none.
    """
    from mlflow.entities import Metric, Param, RunTag

    parsed = None if manifest is None else _parse(manifest, part.model)
    git = None if parsed is None else parsed.git
    at_ms = _milliseconds(part.created_at)
    figures = () if parsed is None else tuple(_figures(parsed))[:_MOST_METRICS]
    params = {"targets": _join(variant.target for variant in part.variants)}
    if parsed is not None:
        params["pipeline_version"] = parsed.pipeline_version[:_MOST_TEXT]
        params |= {
            f"{variant.name}.plan": variant.decision.shipped
            for variant in parsed.variants[:50]
            if variant.decision is not None
        }
    return {
        "metrics": [Metric(name, value, at_ms, 0) for name, value in figures],
        "params": [Param(name, value) for name, value in params.items()],
        "tags": [] if git is None else [RunTag("ortprep.git_commit", git.commit)],
    }


def _parse(manifest: bytes, model: str) -> Manifest | None:
    try:
        return decode(Manifest, parse_json(manifest, name="manifest.json"))
    except BundleError as error:
        log.warning("no metrics in MLflow for a part of %s: %s", model, error.message)
        return None


def _milliseconds(created_at: str) -> int:
    # Always the same, so that logging a figure again does not make it a second one.
    try:
        return int(datetime.fromisoformat(created_at).timestamp() * 1000)
    except ValueError:
        return 0


def _figures(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for variant in manifest.variants:
        for measurement in variant.measurements:
            if measurement.cache == "warm":
                yield from _figures_of(variant, measurement)


def _figures_of(variant: VariantRecord, measurement: MeasurementRecord) -> Iterator[tuple[str, float]]:
    shipped = variant.decision.shipped if variant.decision is not None else DEFAULT_PLAN
    for plan in measurement.plans:
        if plan.plan not in (DEFAULT_PLAN, shipped):
            continue
        for figure in FIGURES:
            summary = getattr(plan, figure)
            if summary is not None and math.isfinite(summary.median):
                yield f"{variant.name}.{plan.plan}.{figure}", summary.median
