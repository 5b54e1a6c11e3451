"""Wheels on PyPI that bring shared libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence

DRIVER_LIBRARIES = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
"""Libraries that come with NVIDIA's driver and with no wheel."""

_COMPONENTS = {
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
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)")


def is_known(library: str) -> bool:
    """Returns whether a library is one that GPU providers compute with, and no part of the system."""
    return library in DRIVER_LIBRARIES or _stem(library) in _COMPONENTS


def requirement_for(library: str, cuda_version: str, requirements: Sequence[str]) -> str | None:
    """Returns the requirement to install for a library, None if no wheel brings it.

    Args:
        library: `libcudart.so.13`.
        cuda_version: CUDA that ONNX Runtime was built with.
        requirements: What the wheel of ONNX Runtime requires; where it bounds the package, its word counts.
            Its names do not: 1.27 asks for `nvidia-cuda-runtime-cu13~=13.0`, and PyPI has 0.0.1 alone of it.
    """
    component = _COMPONENTS.get(_stem(library))
    if component is None:
        return None
    package = component + _suffix(component, cuda_version)
    for requirement in requirements:
        named = _REQUIREMENT.match(requirement)
        if named is not None and _without_suffix(named[1]) == component:
            return package + named[2].strip().replace(" ", "")
    found = _SONAME.fullmatch(library)
    version = found[2] if found is not None else None
    return package if version is None else f"{package}=={version}.*"


def _suffix(component: str, cuda_version: str) -> str:
    major = cuda_version.partition(".")[0]
    if not major.isdigit():
        return ""
    bare = component not in _ALWAYS_SUFFIXED and int(major) >= _FIRST_WITHOUT_SUFFIX
    return "" if bare else f"-cu{major}"


def _without_suffix(package: str) -> str:
    return re.sub(r"-cu\d+$", "", package.lower().replace("_", "-"))


def _stem(library: str) -> str:
    found = _SONAME.fullmatch(library)
    return found[1] if found is not None else ""
