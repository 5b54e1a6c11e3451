"""The one thread that starts, watches and replaces actors, follows the nodes, and tells callers what came.

Whatever happens elsewhere comes to it as a deed in its inbox: a call that was answered, an actor that is
gone, a node that joined.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray

from pipeline.cluster.serving.checks import Check
from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.fleet import Fielded, assign_models, build_job
from pipeline.cluster.serving.hands import Connection, Hand, Life, wait_for_shutdown
from pipeline.cluster.serving.opened_model import Opening
from pipeline.cluster.serving.packing import Call
from pipeline.cluster.serving.posts import Post
from pipeline.cluster.serving.ray_errors import died, failed, is_death, is_node_gone
from pipeline.cluster.serving.roster import Roster, find_heir
from pipeline.cluster.serving.survey import raise_what_went_wrong
from pipeline.errors import IntegrityError, PipelineError, PoolClosedError, PoolError
from pipeline.runtime.pool.crew import Member, WorkerEvent
from pipeline.runtime.pool.devices import Device
from pipeline.runtime.pool.exchange import Outcome

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_HINT = "ray status"
_REFUSALS = 16
"""Refusals in a row after which a worker runs its golden samples, as in a pool on one machine."""
_NODE_PAUSE_S = 5.0
"""For Ray to take a node off its list that an actor died with; then there is nothing to start again."""

Deed = Callable[[], None]


@dataclass(frozen=True)
class Rules:
    """What a steward goes by.

    Attributes:
        openings: How each model is opened, by name.
        start_timeout_s: Seconds within which a worker must be ready.
        run_timeout_s: Seconds that one call may take.
        max_restarts: Deaths in a row until a worker is given up.
        grace_s: Seconds that requests wait for a node to join, where no worker is left for their model.
        observer: Called with everything that happens to workers.
    """

    openings: Mapping[str, Opening]
    start_timeout_s: float
    run_timeout_s: float
    max_restarts: int
    grace_s: float
    observer: Callable[[WorkerEvent], None] | None = None


class Steward:
    """A pool's actors.

    Args:
        rules: What it goes by.
        connection: The pool's.
        make_exchange: Makes the exchange, given what wakes this up.

    Attributes:
        exchange: Where requests are handed in.
        roster: The workers.
        look_at_nodes: Called after a death, which may be that of a node.
        give_up_node: Called with the id of a node whose workers were all given up.
        joining_until: Returns until when a node that was asked may yet join; minus infinity if none was.
        forget_scout: Called in a fork of the process.
    """

    def __init__(
        self,
        rules: Rules,
        connection: Connection,
        make_exchange: Callable[[Callable[[], None]], Exchange],
    ) -> None:
        self._rules, self._connection = rules, connection
        self._inbox: SimpleQueue[Deed] = SimpleQueue()
        self.exchange = make_exchange(partial(self._inbox.put, _nothing))
        self.roster = Roster(self.exchange)
        self._stranded_at: dict[str, float] = {}
        self._stranded: set[str] = set()
        self.look_at_nodes: Deed = _nothing
        self.give_up_node: Callable[[str], None] = _ignore
        self.joining_until: Callable[[], float] = _never
        self.forget_scout: Deed = _nothing
        self._thread = threading.Thread(target=self._run, name="ortprep-ray-pool", daemon=True)
        self.exchange.steward = self._thread
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
        self.forget_scout()

    def begin_check(self) -> Check:
        """Has every ready worker run its golden samples.

        Raises:
            PipelineError: The pool is closed.
        """
        check = Check()
        self.roster.keep(check)
        self._inbox.put(partial(self._begin_check, check))
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
            self.exchange.close(PoolClosedError(f"pool is closed\n  {gone}"))
        else:
            log.error("the pool gives itself up", exc_info=error)
            self.exchange.close(PoolError(f"pool failed\n  {type(error).__name__}: {error}"))
        self._finish()

    def _next_wake(self) -> float:
        rules, hands = self._rules, self.roster.hands
        with self.exchange.changed:
            ledger = self.exchange.ledger
            times = [ledger.next_deadline(), ledger.next_stuck(rules.run_timeout_s)]
        times += [hand.member.start_again_at for hand in hands if hand.member.state == "waiting"]
        times += [
            hand.member.started_at + rules.start_timeout_s
            for hand in hands
            if hand.member.state == "starting"
        ]
        times += [self._strand_at(model) for model in self._stranded_at]
        return min(times, default=math.inf)

    def _tend(self, now: float) -> None:
        """Does what is due."""
        if self.exchange.is_broken:
            self._finish()
            return
        with self.exchange.changed:
            is_late = self.exchange.ledger.next_deadline() <= now
            stuck = self.exchange.ledger.stuck(now, self._rules.run_timeout_s)
        if is_late:
            _tell(self.exchange.expire())
        for number in stuck:
            reason = f"it was at a request for more than {self._rules.run_timeout_s:g} s"
            self._end(self.roster.hand(number), reason)
        for hand in self.roster.hands:
            self._tend_hand(hand, now)
        for model in tuple(self._stranded_at):
            if now >= self._strand_at(model):
                del self._stranded_at[model]
                self._strand(model, self._no_worker(model))

    def _strand_at(self, model: str) -> float:
        """Returns when requests wait no longer: not while a node that joins pulls, or its workers start."""
        if any(model in hand.member.models for hand in self.roster.able()):
            return math.inf
        return max(self._stranded_at[model] + self._rules.grace_s, self.joining_until())

    def _tend_hand(self, hand: Hand, now: float) -> None:
        member = hand.member
        if member.state == "waiting" and now >= member.start_again_at:
            self._start(hand)
        elif member.state == "starting" and now >= member.started_at + self._rules.start_timeout_s:
            self._end_start(hand)
        elif hand.is_retired and not self.exchange.ledger.seat(hand.number).sent:
            self._dismiss(hand, None)

    def _finish(self) -> None:
        self.exchange.close(PoolClosedError("pool was closed"))
        outcomes = self.exchange.abort()
        for hand in self.roster.hands:
            hand.member.state, hand.member.pid = "stopped", None
            _kill(hand.life)
            hand.life = None
        self.roster.end()
        _tell(outcomes)

    # Nodes.

    def field(self, joining: Sequence[Fielded]) -> None:
        """Starts workers on nodes that join.

        Raises:
            PoolError: A model that nobody serves fits nowhere.
        """
        places, self.placement = assign_models(joining, self.roster.count_copies())
        failed = [hand for hand in self.roster.hands if hand.member.state == "failed"]
        again = {one.node.node_id for one in joining}
        for hand in failed:
            if hand.post.node.node_id in again:
                self._dismiss(hand, hand.member.error)
        for place, post, models in places:
            self._add(place, post, models)
        self._settle_models()

    def _add(self, place: Fielded, post: Post, models: tuple[str, ...]) -> None:
        number = self.roster.next_number()
        member = Member(number, post.name, post.workplace, models, self._rules.max_restarts)
        self.exchange.add_worker(number, models)
        hand = Hand(member, post, place)
        self.roster.add(hand)
        self._start(hand)

    def drop_node(self, node_id: str, reason: str) -> None:
        """Lets go of the workers of a node that is gone."""
        for hand in self.roster.on(node_id):
            error = died(hand.member.name, hand.member.pid, None, reason=reason)
            self._dismiss(hand, error)
        self._settle_models()

    def retire_node(self, node_id: str) -> None:
        """Has the workers of a node end as soon as they have answered what they have."""
        for hand in self.roster.on(node_id):
            hand.is_retired = True
            self.exchange.close_worker(hand.number)
        self._settle_models()

    def _dismiss(self, hand: Hand, error: PipelineError | None) -> None:
        """Removes a worker for good."""
        _kill(hand.life)
        hand.life, hand.member.state, hand.member.error = None, "stopped", error
        lost = error or PoolError(f"{hand.member.name} was let go")
        outcomes = self.exchange.lose(hand.number, lost, is_blamed=True)
        self.roster.remove(hand)
        self._say(hand, error=error)
        _tell(outcomes)

    # Workers.

    def _start(self, hand: Hand) -> None:
        self._connection.require()
        with self.roster.changing():
            hand.member.begin(time.monotonic())
        self._say(hand)
        life = Life(hand.member.name, hand.post, self._connection, partial(self._pass_on, hand))
        hand.life, hand.models, hand.opening = life, (), ()
        self._open(hand, life, hand.member.models)
        life.watch(lambda future: self.do(partial(self._ended, hand, life, future)))

    def _open(self, hand: Hand, life: Life, models: tuple[str, ...]) -> None:
        hand.opening = (*hand.opening, *models)
        job = build_job(hand.place, hand.post, models, self._rules.openings)
        life.open(job, lambda future: self.do(partial(self._opened, hand, life, models, future)))

    def _opened(self, hand: Hand, life: Life, models: tuple[str, ...], future: Future[Any]) -> None:
        if hand.life is not life:
            return
        hand.opening = tuple(name for name in hand.opening if name not in models)
        problem = future.exception()
        if problem is not None:
            self._find_dead(hand, problem)
            return
        try:
            raise_what_went_wrong(future.result(), hand.member.name)
        except PipelineError as error:
            self._not_opened(hand, life, models, error)
            return
        self._become_ready(hand, life, models, future.result())

    def _not_opened(self, hand: Hand, life: Life, models: tuple[str, ...], error: PipelineError) -> None:
        if not life.is_ready:
            # What was ready once may be again: a file server was away. Another build never is.
            is_hopeless = not hand.member.was_ready or isinstance(error, IntegrityError)
            self._bury(hand, error, is_hopeless=is_hopeless, is_blamed=False)
            return
        # It goes on with those that it has; another would fare no better with these.
        hand.member.models = tuple(name for name in hand.member.models if name not in models)
        for model in models:
            if not any(model in other.member.models for other in self.roster.able()):
                self._strand(model, error)

    def _become_ready(self, hand: Hand, life: Life, models: tuple[str, ...], said: Mapping[str, Any]) -> None:
        member, hand.models = hand.member, (*hand.models, *models)
        with self.roster.changing():
            member.pid, member.private_bytes = said["pid"], said["private_bytes"]
            member.variants = said["variants"]
            member.buckets = {name: tuple(buckets) for name, buckets in said["buckets"].items()}
            member.phases_s.update(said["phases"])
            if said["gpu"] is not None and not life.is_ready:
                self._name_gpu(hand, said["gpu"])
            is_first, life.is_ready, life.name = not life.is_ready, True, member.name
            if is_first:
                member.become_ready(time.monotonic())
        if not hand.is_retired:
            self.exchange.open_worker(hand.number, life, hand.models)
            for model in hand.models:
                self._stranded_at.pop(model, None)
                self._stranded.discard(model)
        if is_first:
            self._say(hand)
        late = tuple(name for name in member.models if name not in (*hand.models, *hand.opening))
        if late:
            self._open(hand, life, late)

    def _name_gpu(self, hand: Hand, visible: str) -> None:
        """Names a worker by the GPU that Ray gave it."""
        workplace, ordinal = hand.member.workplace, visible.split(",")[0]
        if ordinal.isdecimal():
            device = Device("cuda", int(ordinal), workplace.device.memory_bytes)
            hand.member.workplace = replace(workplace, device=device)
        hand.member.name = f"{hand.post.node.name}/cuda:{ordinal}/{hand.post.index}"

    def _pass_on(self, hand: Hand, life: Life, call: Call, future: Future[Any]) -> None:
        self._inbox.put(partial(self._answered, hand, life, call, future))

    def _answered(self, hand: Hand, life: Life, call: Call, future: Future[Any]) -> None:
        if hand.life is not life:
            return
        error = future.exception()
        if error is None:
            results = future.result()
            outcomes, waited_s = self.exchange.answered(hand.number, life, call, results)
            self._count_refusals(hand, [outputs is None for outputs, _, _ in results])
            with self.roster.changing():
                hand.member.served += len(call.numbers)
                hand.member.latencies_s.extend(waited_s)
            _tell(outcomes)
        elif is_death(error):
            self._find_dead(hand, error)
        else:
            _tell(self.exchange.refuse(hand.number, life, call, failed(hand.member.name, error)))
            self._count_refusals(hand, [True] * len(call.numbers))

    def _count_refusals(self, hand: Hand, are_refused: Sequence[bool]) -> None:
        """Has a worker that refuses one request after the other run its golden samples."""
        for is_refused in are_refused:
            hand.member.refusals = hand.member.refusals + 1 if is_refused else 0
            if is_refused and hand.member.refusals % _REFUSALS == 0:
                Check().begin([hand], self.do, self._replace)

    def _ended(self, hand: Hand, life: Life, future: Future[Any]) -> None:
        error = future.exception()
        if hand.life is life and error is not None:
            self._find_dead(hand, error)

    def _find_dead(self, hand: Hand, problem: BaseException) -> None:
        self._bury(hand, died(hand.member.name, hand.member.pid, problem))
        if is_node_gone(problem) and hand.member.state == "waiting":
            hand.member.start_again_at += _NODE_PAUSE_S
        self.look_at_nodes()

    def _end_start(self, hand: Hand) -> None:
        """Ends a worker that is not ready in time, or that Ray never had room for."""
        within = f"within {self._rules.start_timeout_s:g} s"
        if hand.life is None or hand.life.has_begun:
            self._end(hand, f"it was not ready {within}")
            return
        post = hand.post
        gpus = f" and {post.num_gpus:g} GPUs" if post.num_gpus else ""
        error = PoolError(
            f"{post.node.name} has no room for {hand.member.name}\n"
            f"  expected {post.num_cpus:g} CPUs{gpus} free {within}, got them reserved by others",
            hint="RaySessionPool(…, cpus_per_worker=…), or ray status",
        )
        self._bury(hand, error, is_hopeless=True, is_blamed=False)

    def _end(self, hand: Hand, reason: str) -> None:
        """Ends a worker that hangs."""
        self._bury(hand, died(hand.member.name, hand.member.pid, None, reason=reason))

    def _replace(self, hand: Hand, error: PipelineError) -> None:
        """Ends and replaces a worker that answers wrongly, which no request is to blame for."""
        self._bury(hand, error, is_blamed=False)

    def _bury(
        self, hand: Hand, error: PipelineError, *, is_hopeless: bool = False, is_blamed: bool = True
    ) -> None:
        """Takes note of a worker's death; it is started again unless that is hopeless."""
        _kill(hand.life)
        hand.life, hand.models, hand.opening = None, (), ()
        outcomes = self.exchange.lose(hand.number, error, is_blamed=is_blamed)
        with self.roster.changing():
            hand.member.die(time.monotonic(), error, is_hopeless=is_hopeless)
            self.roster.last_error = error
        level = logging.ERROR if hand.member.state == "failed" else logging.WARNING
        log.log(level, "%s", error.message)
        self._say(hand, error=error)
        if hand.is_retired:
            self._dismiss(hand, error)
        elif all(other.member.state == "failed" for other in self.roster.on(hand.post.node.node_id)):
            self.give_up_node(hand.post.node.node_id)
        self._settle_models()
        _tell(outcomes)

    def _settle_models(self) -> None:
        """Has somebody serve every model that nobody serves any more."""
        able = self.roster.able()
        for model in self._rules.openings:
            if model in self._stranded or any(model in hand.member.models for hand in able):
                continue
            if able:
                self._give_to_heir(model, able)
            else:
                self._stranded_at.setdefault(model, time.monotonic())

    def _give_to_heir(self, model: str, able: Sequence[Hand]) -> None:
        try:
            hand = find_heir(model, able)
        except PoolError as error:
            self._strand(model, error)
            return
        log.warning("%s takes over %s, which no worker is left for", hand.member.name, model)
        with self.roster.changing():
            hand.member.models = (*hand.member.models, model)
        if hand.life is not None and hand.life.is_ready:
            self._open(hand, hand.life, (model,))

    def _strand(self, model: str, error: PipelineError) -> None:
        log.error("%s", error.message)
        self._stranded.add(model)
        _tell(self.exchange.strand(model, error))

    def _no_worker(self, model: str) -> PoolError:
        last = self.roster.last_error
        because = "" if last is None else f"\n  the last one: {last.message}"
        return PoolError(f"no worker is left for {model}{because}", hint=_HINT)

    def _begin_check(self, check: Check) -> None:
        check.begin(self.roster.ready(), self.do, self._replace)

    def _say(self, hand: Hand, *, error: PipelineError | None = None) -> None:
        if self._rules.observer is None:
            return
        member = hand.member
        seconds = member.start_s if member.state == "ready" and member.start_s is not None else 0.0
        event = WorkerEvent(member.number, member.name, member.state, seconds=seconds, error=error)
        try:
            self._rules.observer(event)
        except Exception:  # what an observer does is not to end the pool
            log.exception("the pool's observer failed")


def _nothing() -> None:
    """A deed that only wakes the thread."""


def _ignore(_: str) -> None:
    """Nobody wants to know."""


def _never() -> float:
    return -math.inf


def _kill(life: Life | None) -> None:
    if life is not None:
        with suppress(Exception):  # what cannot be ended now ends with the driver
            life.kill()


def _tell(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        outcome.tell()


_KNOWN: weakref.WeakSet[Steward] = weakref.WeakSet()
_FORGOTTEN: list[Hand] = []


def _forget_all() -> None:
    for steward in tuple(_KNOWN):
        steward.forget()
    _KNOWN.clear()


os.register_at_fork(after_in_child=_forget_all)
