"""The nodes of a cluster, as Ray lists them: which there are, and which of them a pool is to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PoolError

_SHOWN = 8


@dataclass(frozen=True)
class ClusterNode:
    """A node that is alive.

    Attributes:
        node_id: Ray's, unique for ever.
        address: Its IP address.
        cpus: Of its resources as Ray was told of them; so are `gpus` and `memory_bytes`.
        gpus: GPUs.
        memory_bytes: Memory that tasks may take; None if Ray was not told.
        labels: Its labels.
    """

    node_id: str
    address: str
    cpus: float
    gpus: int
    memory_bytes: int | None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What errors and figures call it: its address, and enough of its id to tell it from others there."""
        return f"{self.address}-{self.node_id[:_SHOWN]}"


def parse_nodes(listed: Sequence[Mapping[str, Any]]) -> tuple[ClusterNode, ...]:
    """Returns the nodes that are alive, in the order of their ids.

    Args:
        listed: What `ray.nodes()` returns
            (https://docs.ray.io/en/latest/ray-core/api/doc/ray.nodes.html).
    """
    nodes = [_parse_node(entry) for entry in listed if entry.get("Alive")]
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def _parse_node(entry: Mapping[str, Any]) -> ClusterNode:
    resources = entry.get("Resources") or {}
    memory = resources.get("memory")
    return ClusterNode(
        node_id=str(entry["NodeID"]),
        address=str(entry.get("NodeManagerAddress") or "unknown"),
        cpus=float(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        memory_bytes=None if memory is None else int(memory),
        labels={str(key): str(value) for key, value in (entry.get("Labels") or {}).items()},
    )


@dataclass(frozen=True)
class NodeChoice:
    """Which nodes a pool uses.

    Attributes:
        devices: `all` (the GPUs of a node, or its CPUs where it has none), `cpu` or `cuda`.
        labels: Labels that a node must have, all of them.
    """

    devices: str = "all"
    labels: Mapping[str, str] = field(default_factory=dict)

    def admits(self, node: ClusterNode) -> bool:
        """Says whether a node is one of those."""
        has_devices = {"cpu": node.cpus > 0, "cuda": node.gpus > 0, "all": node.cpus > 0 or node.gpus > 0}
        return has_devices[self.devices] and self.labels.items() <= node.labels.items()


def choose_devices(devices: object) -> str:
    """Returns which devices of every node were asked for.

    Raises:
        PoolError: The text is none of `all`, `cpu`, `cuda`.
    """
    if devices not in ("all", "cpu", "cuda"):
        raise PoolError(
            f"bad devices: {devices!r}\n  expected one of all, cpu, cuda",
            hint="RaySessionPool(…, devices='cuda') takes every GPU of every node",
        )
    return str(devices)
