"""What jobs import: `load`, `SessionPool` for all devices of a node, `connect` for short-lived programs.

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import would be the larger part of this one's
if TYPE_CHECKING:
    from ortprep.runtime.dropin.session import install as install
    from ortprep.runtime.host.client import HostSession as HostSession
    from ortprep.runtime.host.client import connect as connect
    from ortprep.runtime.loading.bundle_loader import load as load
    from ortprep.runtime.loading.bundle_loader import open_bundle as open_bundle
    from ortprep.runtime.loading.forking import load_before_fork as load_before_fork
    from ortprep.runtime.loading.opened_bundle import OpenedBundle as OpenedBundle
    from ortprep.runtime.loading.phases import wait_steady as wait_steady
    from ortprep.runtime.loading.sources import locate as locate
    from ortprep.runtime.pool.config import PoolConfig as PoolConfig
    from ortprep.runtime.pool.report import PoolStats as PoolStats
    from ortprep.runtime.pool.report import WorkerStats as WorkerStats
    from ortprep.runtime.pool.session_pool import SessionPool as SessionPool

_HOMES = {
    "HostSession": "host.client",
    "OpenedBundle": "loading.opened_bundle",
    "PoolConfig": "pool.config",
    "PoolStats": "pool.report",
    "SessionPool": "pool.session_pool",
    "WorkerStats": "pool.report",
    "connect": "host.client",
    "install": "dropin.session",
    "load": "loading.bundle_loader",
    "load_before_fork": "loading.forking",
    "locate": "loading.sources",
    "open_bundle": "loading.bundle_loader",
    "wait_steady": "loading.phases",
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
