"""The one thread of a pool on a cluster: whatever becomes of workers, nodes and requests is done on it.

Whatever happens elsewhere comes to it as a deed in its inbox: a call that was answered, an actor that is
gone, a node that joined.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import ray

from pipeline.cluster.serving.checks import Check
from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.hands import Connection, Hand, wait_for_shutdown
from pipeline.cluster.serving.lives import Lives, Rules
from pipeline.cluster.serving.roster import Roster
from pipeline.errors import PoolClosedError, PoolError
from pipeline.runtime.pool.futures import tell

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0

Deed = Callable[[], None]


class Steward:
    """A pool's thread, and the only one that its workers are changed on.

    Args:
        rules: What it goes by.
        connection: The pool's.
        make_exchange: Makes the exchange, given what wakes this up.

    Attributes:
        exchange: Where requests are handed in.
        roster: The workers.
        lives: What becomes of them.
    """

    def __init__(
        self,
        rules: Rules,
        connection: Connection,
        make_exchange: Callable[[Callable[[], None]], Exchange],
    ) -> None:
        self._run_timeout_s, self._connection = rules.run_timeout_s, connection
        self._inbox: SimpleQueue[Deed] = SimpleQueue()
        self.exchange = make_exchange(partial(self._inbox.put, _nothing))
        self.roster = Roster(self.exchange)
        self.lives = Lives(rules, connection, self.roster, self.exchange, self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="ortprep-ray-pool", daemon=True)
        self.exchange.gate.answering = self._thread
        _KNOWN.add(self)

    # What other threads do.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def do(self, deed: Deed) -> None:
        """Has something done on the thread; takes no lock."""
        self._inbox.put(deed)

    def stop_soon(self) -> None:
        """Has the thread end the actors, fail what is unanswered, and end."""
        self._inbox.put(self._finish)

    def stop(self, timeout_s: float) -> None:
        """Does what `stop_soon` does, and waits for it."""
        if self._thread.ident is None:
            self._finish()
            return
        self.stop_soon()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def forget(self) -> None:
        """Makes this a closed pool without workers, in a process that was forked from the pool's."""
        # Ray's handles are never let go of here: that would call into a Ray whose threads were not forked.
        _FORGOTTEN.extend(self.roster.hands)
        self.exchange.forget(PoolClosedError("a pool cannot be used in a fork of its process"))
        self.roster.forget()
        self.lives.lookout.forget()

    def begin_check(self) -> Check:
        """Has every ready worker run its golden samples.

        Raises:
            PipelineError: The pool is closed.
        """
        check = Check()
        self.roster.keep(check)
        self._inbox.put(partial(self.lives.begin_check, check))
        return check

    # What the thread does.

    def _run(self) -> None:
        while not self.roster.is_over:
            wait_s = min(max(0.0, self._next_wake() - time.monotonic()), _LONGEST_WAIT_S)
            try:
                deed = self._inbox.get(timeout=wait_s)
            except Empty:
                deed = _nothing
            try:
                deed()
                if not self.roster.is_over:
                    self._tend(time.monotonic())
            except Exception as error:  # noqa: BLE001 - whatever it is, no request may wait for ever
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Ends the pool; where Ray is being shut down, what it raises meanwhile says nothing."""
        wait_for_shutdown()
        try:
            self._connection.require()
        except ray.exceptions.RayError as gone:
            self.exchange.gate.close(PoolClosedError(f"pool is closed\n  {gone}"))
        else:
            log.error("the pool gives itself up", exc_info=error)
            self.exchange.gate.close(PoolError(f"pool failed\n  {type(error).__name__}: {error}"))
        self._finish()

    def _next_wake(self) -> float:
        with self.exchange.changed:
            ledger = self.exchange.ledger
            times = ledger.next_deadline(), ledger.next_stuck(self._run_timeout_s)
        return min(*times, self.lives.next_wake())

    def _tend(self, now: float) -> None:
        """Does what is due."""
        if self.exchange.is_broken:
            self._finish()
            return
        with self.exchange.changed:
            is_late = self.exchange.ledger.next_deadline() <= now
            stuck = self.exchange.ledger.stuck(now, self._run_timeout_s)
        if is_late:
            tell(self.exchange.expire())
        for number in stuck:
            self.lives.end_stuck(number)
        self.lives.tend(now)

    def _finish(self) -> None:
        self.exchange.gate.close(PoolClosedError("pool was closed"))
        outcomes = self.exchange.abort()
        self.lives.end_all()
        self.roster.end()
        tell(outcomes)


def _nothing() -> None:
    """A deed that only wakes the thread."""


_KNOWN: weakref.WeakSet[Steward] = weakref.WeakSet()
_FORGOTTEN: list[Hand] = []


def _forget_all() -> None:
    for steward in tuple(_KNOWN):
        steward.forget()
    _KNOWN.clear()


os.register_at_fork(after_in_child=_forget_all)
