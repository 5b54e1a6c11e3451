"""Versions of the tools that decide a stage's outcome, told without importing any of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Distributions of ONNX Runtime. One version of both is not one tool: they compute with other libraries."""

CUDA_LIBRARIES = tuple(
    f"nvidia-{library}{suffix}"
    for library in ("cublas", "cudnn", "cufft", "cuda-runtime")
    for suffix in ("", "-cu12", "-cu13")
)
"""Wheels that may bring the libraries ONNX Runtime computes with on CUDA; what the system has is not told."""


def installed_versions(*packages: str) -> Mapping[str, str]:
    """Returns the versions of those packages that are installed, for a task's key."""
    found = {package: installed_version(package) for package in packages}
    return {package: version for package, version in found.items() if version is not None}


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
