"""Provenance: versions of tools, and hardware."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ortprep.bundle.codec import encode

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Distributions of ONNX Runtime. One version of both is not one tool: they compute with other libraries."""

CUDA_LIBRARIES = tuple(
    f"nvidia-{library}{suffix}"
    for library in ("cublas", "cudnn", "cufft", "cuda-runtime")
    for suffix in ("", "-cu12", "-cu13")
)
"""Wheels that may bring the libraries that ONNX Runtime computes with on CUDA."""


def installed_versions(*packages: str) -> Mapping[str, str]:
    """Returns the versions of those packages that are installed, for a task's key."""
    versions = {package: installed_version(package) for package in packages}
    return {package: version for package, version in versions.items() if version is not None}


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def runtime_versions(target: str, *others: str) -> Mapping[str, str]:
    """Returns the versions of what a model is run with on `cpu` or `cuda`, and of other packages."""
    libraries = CUDA_LIBRARIES if target == "cuda" else ()
    return installed_versions(*ONNXRUNTIME, *libraries, *others)


_PACKAGES = ("onnx", "numpy", *ONNXRUNTIME, "doit", *CUDA_LIBRARIES)


def describe_environment(request: None) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Child function: returns versions and hardware as JSON types; imports ONNX Runtime."""
    import onnxruntime

    from ortprep.runtime.machine.hardware import read_hardware

    return {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime_build": onnxruntime.get_build_info(),
        "onnxruntime_cuda": getattr(onnxruntime, "cuda_version", "") or None,
        "packages": dict(installed_versions(*_PACKAGES)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "hardware": encode(read_hardware()),
    }
