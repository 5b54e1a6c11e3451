"""What jobs import: `load`, `load_progressive`, `load_bucketed`; for every device of a node `SessionPool`.

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in `typing`, whose import would be the larger part of this one's
if TYPE_CHECKING:
    from ortprep.bundle.session_record import SessionPlan
    from ortprep.runtime.buckets.loader import load_bucketed
    from ortprep.runtime.buckets.session import BucketedSession
    from ortprep.runtime.dropin.installation import install
    from ortprep.runtime.loading.bundle_loader import OpenedBundle, load, open_bundle
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.loading.sources import locate
    from ortprep.runtime.placement.assignment import place_models
    from ortprep.runtime.pool.config import PoolConfig
    from ortprep.runtime.pool.session_pool import SessionPool
    from ortprep.runtime.pool.stats import PoolStats, WorkerEvent, WorkerStats
    from ortprep.runtime.progressive.loader import load_progressive
    from ortprep.runtime.progressive.session import ProgressiveSession

__all__ = [
    "BucketedSession",
    "OpenedBundle",
    "PoolConfig",
    "PoolStats",
    "ProgressiveSession",
    "SessionPlan",
    "SessionPool",
    "WorkerEvent",
    "WorkerStats",
    "build_session",
    "install",
    "load",
    "load_bucketed",
    "load_progressive",
    "locate",
    "open_bundle",
    "place_models",
]

_HOMES = {
    "BucketedSession": "buckets.session",
    "OpenedBundle": "loading.bundle_loader",
    "PoolConfig": "pool.config",
    "PoolStats": "pool.stats",
    "ProgressiveSession": "progressive.session",
    "SessionPlan": "loading.session",
    "SessionPool": "pool.session_pool",
    "WorkerEvent": "pool.stats",
    "WorkerStats": "pool.stats",
    "build_session": "loading.session",
    "install": "dropin.installation",
    "load": "loading.bundle_loader",
    "load_bucketed": "buckets.loader",
    "load_progressive": "progressive.loader",
    "locate": "loading.sources",
    "open_bundle": "loading.bundle_loader",
    "place_models": "placement.assignment",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
