"""The same stages and sessions on Ray.

building   prepare on the nodes of a cluster
serving    on Ray Serve: handles and HTTP; needs nothing of the build
data       on Ray Data: `OnnxPredictor`; needs nothing of the build
device     the device that Ray gave a process

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortprep.cluster.data import OnnxPredictor
    from ortprep.cluster.serving.config import ServeConfig
    from ortprep.cluster.serving.pinning import pin_bundle

__all__ = ["OnnxPredictor", "ServeConfig", "pin_bundle"]

_HOMES = {
    "OnnxPredictor": "data",
    "ServeConfig": "serving.config",
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
