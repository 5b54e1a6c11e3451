"""The run of a part as MLflow's users see it: its tags and metrics. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from ortprep.bundle.codec import decode, parse_json
from ortprep.bundle.manifest import Manifest
from ortprep.errors import BundleError
from ortprep.registry.documents import Part

log = logging.getLogger(__name__)

TAG_KIND, TAG_PART = "ortprep.kind", "ortprep.part"
"""Tags by which the runs of all parts, and that of one, are found."""

_DEFAULT_PLAN = "default"
_FIGURES = ("ready_ms", "init_ms", "first_ms", "first_result_ms", "steady_ms", "private_mb")
_MAX_METRICS = 1000
_MAX_TEXT = 5000


def describe_part(part: Part) -> dict[str, str]:
    """Returns the tags of a part's run."""
    variants = part.summary.variants
    return {
        TAG_PART: part.digest,
        TAG_KIND: "part",
        "ortprep.model": part.model,
        "ortprep.source": part.source,
        "ortprep.spec": part.spec,
        "ortprep.created_at": part.summary.created_at,
        "ortprep.targets": join_texts(variant.target for variant in variants),
        "ortprep.onnxruntime": join_texts(variant.onnxruntime for variant in variants),
        "ortprep.hardware": join_texts(variant.hardware for variant in variants),
    }


def join_texts(texts: Iterable[str]) -> str:
    """Returns different texts as one tag, cut to what MLflow takes."""
    return ", ".join(dict.fromkeys(filter(None, texts)))[:_MAX_TEXT]


def list_metrics(part: Part, manifest_data: bytes) -> list[dict[str, Any]]:
    """Returns the figures in a part's `manifest.json` as `runs/log-batch` takes them; none if it is bad."""
    try:
        manifest = decode(Manifest, parse_json(manifest_data, name="manifest.json"))
    except BundleError as error:
        log.warning("no metrics in MLflow for a part of %s: %s", part.model, error.message)
        return []
    # Always the same time, so that logging a figure again does not make it a second one.
    try:
        at_ms = int(datetime.fromisoformat(part.summary.created_at).timestamp() * 1000)
    except ValueError:
        at_ms = 0
    figures = tuple(_list_figures(manifest))[:_MAX_METRICS]
    return [{"key": key, "value": value, "timestamp": at_ms, "step": 0} for key, value in figures]


def _list_figures(manifest: Manifest) -> Iterator[tuple[str, float]]:
    """Yields the medians of the default plan and of the shipped one, warm, with their names."""
    for variant in manifest.variants:
        plans = (_DEFAULT_PLAN, variant.decision.shipped if variant.decision else _DEFAULT_PLAN)
        warm = (measurement for measurement in variant.measurements if measurement.cache == "warm")
        for plan in (plan for measurement in warm for plan in measurement.plans if plan.plan in plans):
            for figure in _FIGURES:
                summary = getattr(plan, figure)
                if math.isfinite(summary.median):
                    yield f"{variant.name}.{plan.plan}.{figure}", summary.median
