"""Anything with a rate: a network, a registry's quota, the driver that submits tasks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pipe:
    """Serves requests in order of arrival, at its full rate.

    The last byte of a queue leaves such a pipe no later than one shared fairly would let it, so what it says
    of saturation holds for those too.

    Attributes:
        rate: Units (bytes, requests, tasks) per second; `math.inf` for no limit.
        free_at_s: Time when everything taken so far is through, in seconds.
        total: Units taken so far.
        waited_s: Total time in the queue, in seconds.
    """

    rate: float
    free_at_s: float = 0.0
    total: float = 0.0
    waited_s: float = 0.0

    def take(self, now_s: float, units: float) -> float:
        """Queues some units and returns when the last of them is through."""
        start_s = max(now_s, self.free_at_s)
        self.waited_s += start_s - now_s
        self.free_at_s = start_s + units / self.rate
        self.total += units
        return self.free_at_s
