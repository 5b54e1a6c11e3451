"""What a machine is, as labels of a Ray node; kinds of hardware are told by them.

Keys and values are those that Ray takes (https://docs.ray.io/en/latest/ray-core/scheduling/labels.html): up
to 63 letters, digits, `-`, `_` and `.`, and a prefix with a slash.
"""

from __future__ import annotations

import re

from pipeline.runtime.hardware import Hardware

PREFIX = "ortprep.io"

_TOLD = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
"""Instruction sets that ONNX Runtime's kernels differ by, and that a fleet may be told apart by."""


def describe_hardware(hardware: Hardware) -> dict[str, str]:
    """Returns a machine's labels.

    Args:
        hardware: What it is.

    Returns:
        Architecture, processor, an instruction set each that it has, and its first GPU's name and compute
        capability (`8.6`).
    """
    labels = {"machine": hardware.machine, "cpu": hardware.cpu_model}
    labels |= {feature: "true" for feature in _TOLD if feature in hardware.cpu_features}
    if hardware.gpus:
        major, minor = hardware.gpus[0].compute_capability
        labels |= {"gpu": hardware.gpus[0].name, "compute-capability": f"{major}.{minor}"}
    told = {f"{PREFIX}/{key}": _fit(value) for key, value in labels.items()}
    return {key: value for key, value in told.items() if value}


def _fit(text: str) -> str:
    """Returns text as a label may be: what does not fit becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")
