"""Which models somebody serves: a model whose last worker is gone goes to another, or is given up in time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence

from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.hands import Hand
from pipeline.cluster.serving.roster import Roster, find_heir
from pipeline.errors import PipelineError, PoolError
from pipeline.runtime.pool.futures import tell

log = logging.getLogger(__name__)


class Coverage:
    """A pool's models; called by its `Lives` alone.

    Args:
        models: Their names.
        roster: The workers.
        exchange: Where requests wait.
        grace_s: Seconds that these wait for a node to join, where no worker is left for their model.
    """

    def __init__(self, models: Collection[str], roster: Roster, exchange: Exchange, grace_s: float) -> None:
        self._models, self._roster, self._exchange, self._grace_s = models, roster, exchange, grace_s
        self._alone_since: dict[str, float] = {}
        self._stranded: set[str] = set()

    def settle(self) -> list[tuple[Hand, str]]:
        """Returns who takes over which model that nobody serves any more, now that workers changed."""
        able = self._roster.able()
        heirs = []
        for model in self._models:
            if model in self._stranded or any(model in hand.member.models for hand in able):
                continue
            if not able:
                self._alone_since.setdefault(model, time.monotonic())
            elif (heir := self._bequeath(model, able)) is not None:
                heirs.append((heir, model))
        return heirs

    def _bequeath(self, model: str, able: Sequence[Hand]) -> Hand | None:
        try:
            hand = find_heir(model, able)
        except PoolError as error:
            self._strand(model, error)
            return None
        log.warning("%s takes over %s, which no worker is left for", hand.member.name, model)
        with self._roster.changing():
            hand.member.models = (*hand.member.models, model)
        return hand

    def recover(self, models: Collection[str]) -> None:
        """Notes that a worker has opened models."""
        for model in models:
            self._alone_since.pop(model, None)
            self._stranded.discard(model)

    def give_up(self, models: Collection[str], error: PipelineError) -> None:
        """Notes that a worker cannot open models that it should have; others that serve them go on."""
        for model in models:
            if not any(model in other.member.models for other in self._roster.able()):
                self._strand(model, error)

    def next_wake(self, joining_until: float) -> float:
        """Returns when `tend` has something to do.

        Args:
            joining_until: Until when a node that was asked may yet join; minus infinity if none was.
        """
        return min((self._strand_at(model, joining_until) for model in self._alone_since), default=math.inf)

    def tend(self, now: float, joining_until: float) -> None:
        """Gives up the models that nobody came for in time."""
        for model in tuple(self._alone_since):
            if now >= self._strand_at(model, joining_until):
                del self._alone_since[model]
                self._strand(model, self._no_worker(model))

    def _strand_at(self, model: str, joining_until: float) -> float:
        """Returns when requests wait no longer: not while a node that joins pulls, or its workers start."""
        if any(model in hand.member.models for hand in self._roster.able()):
            return math.inf
        return max(self._alone_since[model] + self._grace_s, joining_until)

    def _strand(self, model: str, error: PipelineError) -> None:
        log.error("%s", error.message)
        self._stranded.add(model)
        tell(self._exchange.strand(model, error))

    def _no_worker(self, model: str) -> PoolError:
        last = self._roster.last_error
        because = "" if last is None else f"\n  the last one: {last.message}"
        return PoolError(f"no worker is left for {model}{because}", hint="ray status")
