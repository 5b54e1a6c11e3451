"""A pool's workers, as the steward keeps them and other threads ask for them."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipeline.cluster.serving.checks import Check
from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.hands import Hand
from pipeline.cluster.serving.placing import choose_heir
from pipeline.errors import PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from pipeline.runtime.pool.crew import Member, PoolStats
from pipeline.runtime.pool.futures import renew

_GONE = ("failed", "stopped")


class Roster:
    """The workers of a pool.

    Only the steward's thread changes it.

    Args:
        exchange: Which says what each worker has.

    Attributes:
        is_over: Whether the pool has ended.
        last_error: What the last worker that was lost was lost of.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._changed = threading.Condition()
        self._hands: dict[int, Hand] = {}
        self._free: list[int] = []
        self._checks: list[Check] = []
        self.is_over = False
        self.last_error: PipelineError | None = None

    @property
    def hands(self) -> tuple[Hand, ...]:
        """All workers."""
        return tuple(self._hands.values())

    def hand(self, number: int) -> Hand:
        """Returns a worker by its number."""
        return self._hands[number]

    def on(self, node_id: str) -> list[Hand]:
        """Returns the workers of a node."""
        return [hand for hand in self.hands if hand.post.node.node_id == node_id]

    def able(self) -> list[Hand]:
        """Returns those that serve, or will."""
        return [hand for hand in self.hands if hand.member.state not in _GONE and not hand.is_retired]

    def ready(self) -> list[Hand]:
        """Returns those that can be asked something now."""
        return [hand for hand in self.hands if hand.life is not None and hand.life.is_ready]

    def count_copies(self) -> Mapping[str, int]:
        """Returns how many devices serve each model."""
        devices = {(hand.post.node.node_id, hand.post.slot): hand.member.models for hand in self.able()}
        return Counter(model for models in devices.values() for model in models)

    def count(self, model: str | None = None) -> int:
        """Returns how many workers serve, or serve a model."""
        return sum(model is None or model in hand.member.models for hand in self.able())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Lets nobody look while workers change, and then those that wait for that."""
        with self._changed:
            yield
            self._changed.notify_all()

    def next_number(self) -> int:
        """Returns the number of the next worker to be added: one that is free again, if there is one."""
        return self._free[-1] if self._free else len(self._hands)

    def add(self, hand: Hand) -> None:
        """Adds a worker with the next number."""
        with self.changing():
            if self._free:
                self._free.pop()
            self._hands[hand.number] = hand

    def remove(self, hand: Hand) -> None:
        """Removes a worker; its number is free again."""
        with self.changing():
            del self._hands[hand.number]
            self._free.append(hand.number)
            self.last_error = hand.member.error or self.last_error

    def keep(self, check: Check) -> None:
        """Has a check fail when the pool ends, if that comes first.

        Raises:
            PipelineError: It has ended, or is closed.
        """
        with self._changed:
            if self.is_over or self._exchange.gate.closed_by is not None:
                raise self._closed_error()
            self._checks = [one for one in self._checks if not one.done.is_set()]
            self._checks.append(check)

    def end(self) -> None:
        """Notes that the pool has ended, and fails what waits for its workers."""
        with self.changing():
            self.is_over = True
            for check in self._checks:
                check.fail(self._closed_error())

    def forget(self) -> None:
        """Becomes that of a pool that has ended, in a fork of its process."""
        self._changed = threading.Condition()
        self._hands, self._checks, self.is_over = {}, [], True

    def _closed_error(self) -> PipelineError:
        return renew(self._exchange.gate.closed_by or PoolClosedError("pool was closed"))

    def wait_ready(
        self, count: int | None, *, timeout_s: float | None = None, may_join: bool = False
    ) -> None:
        """Waits until so many workers are ready; None for all there are.

        Args:
            count: How many.
            timeout_s: Seconds to wait; None as long as it takes.
            may_join: Whether to wait for nodes to join, where those that are there will not do for a count.

        Raises:
            RequestTimeoutError: They were not by then.
            PipelineError: They never will be: what the first of the others said.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                members = [hand.member for hand in self._hands.values() if not hand.is_retired]
                ready = sum(member.state == "ready" for member in members)
                wanted = len(members) if count is None else count
                if ready >= wanted and not self.is_over:
                    return
                lost = [member for member in members if member.state == "failed"]
                is_fixed = count is None or not may_join
                if self.is_over or (is_fixed and len(members) - len(lost) < wanted):
                    raise self._first_error(lost, wanted)
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise RequestTimeoutError(
                        f"workers are not ready\n  expected {wanted} within {timeout_s:g} s, got {ready}"
                    )
                self._changed.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))

    def _first_error(self, lost: Sequence[Member], wanted: int) -> PipelineError:
        if self.is_over:
            return self._closed_error()
        found = next((member.error for member in lost if member.error is not None), self.last_error)
        if found is not None:
            return renew(found)
        return PoolError(
            f"too few workers\n  expected {wanted}, got nodes with devices for {len(self._hands)}",
            hint="RaySessionPool(…, min_ready=…, workers_per_device=…), or ray status",
        )

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing."""
        pending, waiting = self._exchange.counts
        with self._changed:
            workers = tuple(
                hand.member.stats(len(self._exchange.ledger.seat(hand.number).sent)) for hand in self.hands
            )
        return PoolStats(
            workers=workers,
            pending=pending,
            waiting=waiting,
            is_degraded=any(worker.state == "failed" for worker in workers),
            shared_bytes=0,
            used_bytes=0,
            copied_in_bytes=self._exchange.sent_bytes,
            copied_out_bytes=self._exchange.received_bytes,
        )


def find_heir(model: str, able: Sequence[Hand]) -> Hand:
    """Returns the worker that takes over a model whose last one is gone.

    Raises:
        PoolError: No worker has room for it.
    """
    hands = {hand.number: hand for hand in able}
    loads = {number: {load.name: load for load in hand.place.loads} for number, hand in hands.items()}
    taken = {n: [loads[n][name] for name in hand.member.models] for n, hand in hands.items()}
    rooms = {number: hand.place.room(hand.post) for number, hand in hands.items()}
    return hands[choose_heir(loads[able[0].number][model], taken, rooms)]
