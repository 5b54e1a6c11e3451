"""What a bundle was made with; runs in a child, because it imports ONNX Runtime."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.stages.tools import CUDA_LIBRARIES, ONNXRUNTIME, installed_versions

_PACKAGES = ("onnx", "numpy", *ONNXRUNTIME, "doit", *CUDA_LIBRARIES)


def describe_environment(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Returns versions and hardware as JSON types."""
    import onnxruntime

    from pipeline.runtime.hardware import read_hardware

    return {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime_build": onnxruntime.get_build_info(),
        "onnxruntime_cuda": getattr(onnxruntime, "cuda_version", "") or None,
        "packages": dict(installed_versions(*_PACKAGES)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "hardware": encode(read_hardware()),
    }
