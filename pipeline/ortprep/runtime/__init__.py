"""What jobs import: `load`, `load_progressive`, `load_bucketed`; for every device of a node `SessionPool`.

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import would be the larger part of this one's
if TYPE_CHECKING:
    from ortprep.runtime.buckets.loader import load_bucketed as load_bucketed
    from ortprep.runtime.buckets.session import BucketedSession as BucketedSession
    from ortprep.runtime.dropin.installation import install as install
    from ortprep.runtime.loading.bundle_loader import OpenedBundle as OpenedBundle
    from ortprep.runtime.loading.bundle_loader import load as load
    from ortprep.runtime.loading.bundle_loader import open_bundle as open_bundle
    from ortprep.runtime.loading.sources import locate as locate
    from ortprep.runtime.placement.assignment import place_models as place_models
    from ortprep.runtime.pool.config import PoolConfig as PoolConfig
    from ortprep.runtime.pool.session_pool import SessionPool as SessionPool
    from ortprep.runtime.pool.stats import PoolStats as PoolStats
    from ortprep.runtime.pool.stats import WorkerEvent as WorkerEvent
    from ortprep.runtime.pool.stats import WorkerStats as WorkerStats
    from ortprep.runtime.progressive.loader import load_progressive as load_progressive
    from ortprep.runtime.progressive.session import ProgressiveSession as ProgressiveSession

_HOMES = {
    "BucketedSession": "buckets.session",
    "OpenedBundle": "loading.bundle_loader",
    "PoolConfig": "pool.config",
    "PoolStats": "pool.stats",
    "ProgressiveSession": "progressive.session",
    "SessionPool": "pool.session_pool",
    "WorkerEvent": "pool.stats",
    "WorkerStats": "pool.stats",
    "install": "dropin.installation",
    "load": "loading.bundle_loader",
    "load_bucketed": "buckets.loader",
    "load_progressive": "progressive.loader",
    "locate": "loading.sources",
    "open_bundle": "loading.bundle_loader",
    "place_models": "placement.assignment",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
