"""The actors that a node gets, and what each reserves of it. Functions of values."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cluster.serving.nodes import ClusterNode
from pipeline.errors import PoolError
from pipeline.runtime.pool.devices import Device
from pipeline.runtime.pool.workplaces import Workplace


@dataclass(frozen=True)
class Wanted:
    """How many actors a node gets, and what they may take.

    Attributes:
        devices: `all`, `cpu` or `cuda`.
        workers_per_device: Actors on each device.
        cpus_per_worker: Processors that Ray reserves for each; None for the node's, divided among its CPU
            workers, and one for a GPU worker.
        threads: Threads of each; None for as many as processors are reserved, at least one.
    """

    devices: str = "all"
    workers_per_device: int = 1
    cpus_per_worker: float | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Post:
    """A place for one actor.

    Attributes:
        node: The node it is pinned to.
        slot: Which of the node's devices, from 0; which GPU that is, Ray decides.
        index: Which of the workers on the device.
        num_cpus: Processors that Ray reserves.
        num_gpus: GPUs likewise, a part of one where several workers share it.
        workplace: How its sessions are made.
    """

    node: ClusterNode
    slot: int
    index: int
    num_cpus: float
    num_gpus: float
    workplace: Workplace

    @property
    def name(self) -> str:
        """Node, device, and which of the workers there."""
        return f"{self.node.name}/{self.workplace.device.name}/{self.index}"


def plan_posts(node: ClusterNode, wanted: Wanted, *, memory_bytes: int | None) -> tuple[Post, ...]:
    """Returns the places of a node, device by device.

    Args:
        node: The node.
        wanted: What each is to be.
        memory_bytes: What a device there has: that of the first GPU, or the machine's; None if unknown.

    Raises:
        PoolError: The node has no such device, or less of it than was asked for.
    """
    on_gpu = wanted.devices == "cuda" or (wanted.devices == "all" and node.gpus > 0)
    count = node.gpus if on_gpu else int(node.cpus > 0)
    if not count:
        raise PoolError(
            f"node {node.name} has no {'GPU' if on_gpu else 'CPU'} for workers\n"
            f"  got {node.cpus:g} CPUs and {node.gpus} GPUs",
            hint="ray status",
        )
    workers = count * wanted.workers_per_device
    num_cpus = _share_of(node.cpus, workers, wanted.cpus_per_worker, most=1.0 if on_gpu else None)
    if num_cpus * workers > node.cpus:
        raise PoolError(
            f"node {node.name} has too few CPUs\n"
            f"  expected {num_cpus:g} for each of {workers} workers, got {node.cpus:g}",
            hint="RaySessionPool(…, cpus_per_worker=…, workers_per_device=…)",
        )
    threads = wanted.threads if wanted.threads is not None else max(1, int(num_cpus))
    return tuple(
        Post(
            node=node,
            slot=slot,
            index=index,
            num_cpus=num_cpus,
            num_gpus=_share_of_gpu(wanted.workers_per_device) if on_gpu else 0.0,
            workplace=Workplace(
                device=Device("cuda" if on_gpu else "cpu", slot, memory_bytes),
                device_id=0 if on_gpu else None,  # Ray lets an actor see its own GPU alone
                environment={},
                threads=threads,
                may_spin=workers == 1,
                processors=None,
            ),
        )
        for slot in range(count)
        for index in range(wanted.workers_per_device)
    )


def _share_of(cpus: float, workers: int, asked: float | None, *, most: float | None) -> float:
    if asked is not None:
        return asked
    share = cpus / workers
    share = float(int(share)) if share >= 1 else _round_down(share)  # Ray takes whole ones, or parts of one
    return share if most is None else min(most, share)


def _share_of_gpu(workers: int) -> float:
    return 1.0 if workers == 1 else _round_down(1 / workers)


def _round_down(share: float) -> float:
    """Returns a share in Ray's resolution of 1/10000, so that all of them together are not too many."""
    return int(share * 10_000) / 10_000
