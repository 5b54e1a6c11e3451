"""Inference with bundles on Ray: `BundleDeployment` for Ray Serve, `OnnxPredictor` for Ray Data.

config              `ServeConfig`, and the options of Serve that follow from it
serve_file          the Serve config file that `ortprep serve-config` writes
deployment          what runs in a replica, and Serve applications of it
http_api            the Open Inference Protocol over HTTP; the bearer token and the budget of clients
inference_protocol  its requests and responses, as functions of bytes
pinning             an alias becomes the version it names now; replicas may follow it
predictor           `OnnxPredictor`: rows become batches
device              the device that Ray gave a process

Nodes need nothing of the build.
Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortprep.ray_inference.config import ServeConfig
    from ortprep.ray_inference.pinning import pin_bundle
    from ortprep.ray_inference.predictor import OnnxPredictor

__all__ = ["OnnxPredictor", "ServeConfig", "pin_bundle"]

_HOMES = {
    "OnnxPredictor": "predictor",
    "ServeConfig": "config",
    "pin_bundle": "pinning",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
