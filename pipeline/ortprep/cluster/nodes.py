"""The nodes of a cluster, as Ray lists them, and the labels that tell kinds of hardware apart.

Keys and values of labels are those that Ray takes
(https://docs.ray.io/en/latest/ray-core/scheduling/labels.html): up to 63 letters, digits, `-`,
`_` and `.`, and a prefix with a slash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortprep.runtime.machine.hardware import Hardware

PREFIX = "ortprep.io"

_INSTRUCTION_SETS = (
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
"""Instruction sets that ONNX Runtime's kernels differ by, and that may distinguish the kinds of a fleet."""


@dataclass(frozen=True)
class ClusterNode:
    """A node that is alive.

    Attributes:
        id: The cluster's name of it.
        address: Host name or IP address, for people.
        labels: Values of labels, by key.
        resources: All that it has, taken or not: `CPU`, `GPU` and its own.
    """

    id: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


def parse_nodes(listed: Sequence[Mapping[str, Any]]) -> tuple[ClusterNode, ...]:
    """Returns the nodes that are alive, of what `ray.nodes()` lists."""
    return tuple(
        ClusterNode(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            dict(node.get("Labels") or {}),
            dict(node.get("Resources") or {}),
        )
        for node in listed
        if node["Alive"]
    )


def describe_hardware(hardware: Hardware) -> dict[str, str]:
    """Returns a machine's labels.

    Returns:
        Architecture, processor, an instruction set each that it has, and its first GPU's name and compute
        capability (`8.6`).
    """
    labels = {"machine": hardware.machine, "cpu": hardware.cpu_model}
    labels |= {feature: "true" for feature in _INSTRUCTION_SETS if feature in hardware.cpu_features}
    if hardware.gpus:
        major, minor = hardware.gpus[0].compute_capability
        labels |= {"gpu": hardware.gpus[0].name, "compute-capability": f"{major}.{minor}"}
    fitted = {f"{PREFIX}/{key}": _fit(value) for key, value in labels.items()}
    return {key: value for key, value in fitted.items() if value}


def _fit(text: str) -> str:
    """Returns text as a label may be: what does not fit becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")
