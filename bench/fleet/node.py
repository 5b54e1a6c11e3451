"""A machine: stages share it, and measurements have their device, or the whole machine, to themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpy import Environment, Event

    from bench.fleet.build_job import BuildJob


@dataclass(frozen=True)
class Grant:
    """What a stage holds, or waits for.

    Attributes:
        event: Happens when it is granted.
        is_exclusive: Whether it is for a device alone.
    """

    event: Event
    is_exclusive: bool


@dataclass
class Node:
    """A machine of a fleet.

    Where a measurement holds the whole machine, nothing else runs beside it, and what comes later waits
    behind a measurement that waits: `ortprep.measuring.device_lock` does so.

    Attributes:
        name: For traces.
        kind: Index of its kind of hardware.
        devices: Jobs that live on it at most: each has a device for itself.
        is_alone: Whether an exclusive stage holds the whole machine.
        is_alive: False between its death and its replacement.
        deaths: How often it died and was replaced.
        jobs: Those that live on it.
    """

    name: str
    kind: int
    devices: int
    is_alone: bool
    is_alive: bool = True
    deaths: int = 0
    jobs: set[BuildJob] = field(default_factory=set)
    _waiting: list[Grant] = field(default_factory=list)
    _shared: int = 0
    _exclusive: int = 0

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return self.devices - len(self.jobs) if self.is_alive else 0

    def request(self, env: Environment, *, is_exclusive: bool) -> Grant:
        """Asks to run beside others, or alone; the grant's event happens when that may be."""
        grant = Grant(env.event(), is_exclusive)
        self._waiting.append(grant)
        self._serve()
        return grant

    def release(self, grant: Grant) -> None:
        """Gives back what was granted, or stops waiting for it."""
        if not grant.event.triggered:
            self._waiting.remove(grant)
        elif grant.is_exclusive:
            self._exclusive -= 1
        else:
            self._shared -= 1
        self._serve()

    def _serve(self) -> None:
        left: list[Grant] = []
        for grant in self._waiting:
            gated = self.is_alone and any(one.is_exclusive for one in left)
            fits = self._fits_exclusive if grant.is_exclusive else self._fits_shared
            if gated or not fits():
                left.append(grant)
                continue
            self._exclusive += grant.is_exclusive
            self._shared += not grant.is_exclusive
            grant.event.succeed()
        self._waiting = left

    def _fits_shared(self) -> bool:
        return not (self.is_alone and self._exclusive)

    def _fits_exclusive(self) -> bool:
        if self.is_alone:
            return not self._exclusive and not self._shared
        return self._exclusive < self.devices


def emptiest(nodes: Sequence[Node]) -> Node | None:
    """Returns the node with the most free slots, the first of equals; None if all are full."""
    best = max(nodes, key=lambda node: node.free_slots)
    return best if best.free_slots > 0 else None
