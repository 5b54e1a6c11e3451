"""Golden samples that workers run again, between other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from pipeline.cluster.serving.hands import Hand, Life
from pipeline.cluster.serving.ray_errors import died
from pipeline.cluster.serving.survey import raise_what_went_wrong
from pipeline.errors import PipelineError

Do = Callable[[Callable[[], None]], None]
"""Has something done on the steward's thread."""


class Check:
    """One check of all workers.

    Attributes:
        wrong: What was wrong, by worker's name.
        done: Set when all have said, or the pool has ended.
        error: What it ended with; None if it has not.
    """

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        self.error: PipelineError | None = None
        self.done = threading.Event()
        self._waiting: set[int] = set()

    def fail(self, error: PipelineError) -> None:
        """Ends it before all have said, unless they have."""
        if not self.done.is_set():
            self.error = error
            self.done.set()

    def begin(self, hands: Sequence[Hand], do: Do, bury: Callable[[Hand, PipelineError], None]) -> None:
        """Asks workers; called on the steward's thread.

        Args:
            hands: The workers, which are ready.
            do: Has something done on that thread.
            bury: Ends and replaces a worker that answers wrongly.
        """
        self._waiting = {hand.number for hand in hands}
        for hand in hands:
            if hand.life is not None:
                hand.life.check(partial(self._pass_on, do, bury, hand, hand.life))
        if not hands:
            self.done.set()

    def _pass_on(
        self,
        do: Do,
        bury: Callable[[Hand, PipelineError], None],
        hand: Hand,
        life: Life,
        future: Future[Any],
    ) -> None:
        do(partial(self._said, bury, hand, life, future))

    def _said(
        self, bury: Callable[[Hand, PipelineError], None], hand: Hand, life: Life, future: Future[Any]
    ) -> None:
        problem = future.exception()
        try:
            if problem is not None:
                raise died(hand.member.name, hand.member.pid, problem)
            raise_what_went_wrong(future.result(), hand.member.name)
        except PipelineError as error:
            self.wrong[hand.member.name] = error.message
            if hand.life is life:
                bury(hand, error)
        self._waiting.discard(hand.number)
        if not self._waiting:
            self.done.set()
