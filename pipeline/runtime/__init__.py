"""What jobs import: `load`, `load_progressive`, `load_bucketed`; for every device of a node `SessionPool`.

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.bundle.session_record import SessionPlan
    from pipeline.runtime.bucketed_session import BucketedSession
    from pipeline.runtime.buckets import load_bucketed
    from pipeline.runtime.hardware import Hardware, read_hardware
    from pipeline.runtime.loading.bundle_loader import OpenedBundle, load, open_bundle
    from pipeline.runtime.loading.session import build_session
    from pipeline.runtime.loading.sources import locate
    from pipeline.runtime.loading.variant_selection import Selection, select_variant
    from pipeline.runtime.pool.crew import PoolStats, WorkerEvent, WorkerStats
    from pipeline.runtime.pool.placement import Placement, place_models
    from pipeline.runtime.pool.session_pool import SessionPool
    from pipeline.runtime.progressive import load_progressive
    from pipeline.runtime.progressive_session import ProgressiveSession

__all__ = [
    "BucketedSession",
    "Hardware",
    "OpenedBundle",
    "Placement",
    "PoolStats",
    "ProgressiveSession",
    "Selection",
    "SessionPlan",
    "SessionPool",
    "WorkerEvent",
    "WorkerStats",
    "build_session",
    "load",
    "load_bucketed",
    "load_progressive",
    "locate",
    "open_bundle",
    "place_models",
    "read_hardware",
    "select_variant",
]

_HOMES = {
    "BucketedSession": "bucketed_session",
    "Hardware": "hardware",
    "OpenedBundle": "loading.bundle_loader",
    "Placement": "pool.placement",
    "PoolStats": "pool.crew",
    "ProgressiveSession": "progressive_session",
    "Selection": "loading.variant_selection",
    "SessionPlan": "loading.session",
    "SessionPool": "pool.session_pool",
    "WorkerEvent": "pool.crew",
    "WorkerStats": "pool.crew",
    "build_session": "loading.session",
    "load": "loading.bundle_loader",
    "load_bucketed": "buckets",
    "load_progressive": "progressive",
    "locate": "loading.sources",
    "open_bundle": "loading.bundle_loader",
    "place_models": "pool.placement",
    "read_hardware": "hardware",
    "select_variant": "loading.variant_selection",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
