"""Wheels on PyPI that bring shared libraries."""

from __future__ import annotations

import re

DRIVER_LIBRARIES = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
"""Libraries that come with NVIDIA's driver and with no wheel."""

_PACKAGES = {
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libcufft": "nvidia-cufft",
    "libcurand": "nvidia-curand",
    "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse",
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libnvJitLink": "nvidia-nvjitlink",
    "libcudnn": "nvidia-cudnn",
    "libnvinfer": "tensorrt",
    "libnvinfer_plugin": "tensorrt",
    "libnvonnxparser": "tensorrt",
}
_ALWAYS_SUFFIXED = frozenset({"nvidia-cudnn", "tensorrt"})
_FIRST_WITHOUT_SUFFIX = 13
"""CUDA from which on NVIDIA's wheels of the toolkit no longer carry its number in their names."""

_SONAME = re.compile(r"(lib[A-Za-z_0-9]+?)\.so(?:\.(\d+))?(?:\..*)?")


def is_known(library: str) -> bool:
    """Returns whether a library is one that GPU providers compute with, and no part of the system."""
    return library in DRIVER_LIBRARIES or _stem(library) in _PACKAGES


def requirement_for(library: str, cuda_version: str) -> str | None:
    """Returns the requirement to install for a library, such as `libcudart.so.13`; None if no wheel has it.

    Args:
        library: Its file's name.
        cuda_version: CUDA that ONNX Runtime was built with.
    """
    package = _PACKAGES.get(_stem(library))
    if package is None:
        return None
    major = cuda_version.partition(".")[0]
    if major.isdigit() and (package in _ALWAYS_SUFFIXED or int(major) < _FIRST_WITHOUT_SUFFIX):
        package += f"-cu{major}"
    soname = _SONAME.fullmatch(library)
    version = soname[2] if soname is not None else None
    return package if version is None else f"{package}=={version}.*"


def _stem(library: str) -> str:
    soname = _SONAME.fullmatch(library)
    return soname[1] if soname is not None else ""
