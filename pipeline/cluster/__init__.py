"""The same stages and sessions on Ray.

building   prepare on the nodes of a cluster
serving    `RaySessionPool` and `OnnxPredictor`; needs nothing of the build

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.cluster.serving.pinning import pin_bundle
    from pipeline.cluster.serving.predictor import OnnxPredictor
    from pipeline.cluster.serving.ray_session_pool import RaySessionPool

__all__ = ["OnnxPredictor", "RaySessionPool", "pin_bundle"]

_HOMES = {
    "OnnxPredictor": "serving.predictor",
    "RaySessionPool": "serving.ray_session_pool",
    "pin_bundle": "serving.pinning",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
