"""The same stages and sessions on Ray.

building   prepare on the nodes of a cluster
serving    on Ray Serve: `RaySessionPool`, HTTP and gRPC; needs nothing of the build
data       on Ray Data: `OnnxPredictor`; needs nothing of the build
nodes      the nodes of a cluster, and their labels
device     the device that Ray gave a process

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ortprep.errors import MissingExtraError
from ortprep.versions import install_command

if TYPE_CHECKING:
    from ortprep.cluster.data.predictor import OnnxPredictor, PredictorConfig
    from ortprep.cluster.serving.config import ServeConfig
    from ortprep.cluster.serving.pinning import pin_bundle
    from ortprep.cluster.serving.ray_session_pool import RaySessionPool

__all__ = ["OnnxPredictor", "PredictorConfig", "RaySessionPool", "ServeConfig", "pin_bundle"]

_HOMES = {
    "OnnxPredictor": "data.predictor",
    "PredictorConfig": "data.predictor",
    "RaySessionPool": "serving.ray_session_pool",
    "ServeConfig": "serving.config",
    "pin_bundle": "serving.pinning",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtraError(
            f"Ray is not installed\n  expected it for {name}", hint=install_command("ray")
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
