"""Births and deaths of a pool's workers, and what they say in between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pipeline.cluster.serving.checks import Check, Do
from pipeline.cluster.serving.coverage import Coverage
from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.fleet import Fielded, assign_models, build_job
from pipeline.cluster.serving.hands import Connection, Hand, Life
from pipeline.cluster.serving.opened_model import Opening
from pipeline.cluster.serving.packing import Call
from pipeline.cluster.serving.posts import Post
from pipeline.cluster.serving.ray_errors import died, failed, is_death, is_node_gone
from pipeline.cluster.serving.roster import Roster
from pipeline.cluster.serving.survey import raise_what_went_wrong
from pipeline.errors import IntegrityError, PipelineError, PoolError
from pipeline.runtime.pool.crew import Member, WorkerEvent
from pipeline.runtime.pool.devices import Device
from pipeline.runtime.pool.futures import tell
from pipeline.runtime.pool.placement import Placement

log = logging.getLogger(__name__)

_REFUSALS = 16
"""Refusals in a row after which a worker runs its golden samples, as in a pool on one machine."""
_NODE_PAUSE_S = 5.0
"""For Ray to take a node off its list that an actor died with; then there is nothing to start again."""


@dataclass(frozen=True)
class Rules:
    """What a pool's workers are kept by.

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


class Lookout(Protocol):
    """Who follows the cluster's nodes, as far as the keepers of workers have something to say to it."""

    def look_now(self) -> None:
        """Looks at the nodes, after a death that may be one of a node."""

    def give_up(self, node_id: str) -> None:
        """Uses a node no more for some time, whose workers were all given up."""

    def joining_until(self) -> float:
        """Returns until when a node that was asked may yet join; minus infinity if none was."""

    def forget(self) -> None:
        """Lets go of what may be locked for ever, in a fork of the process."""


class NoLookout:
    """Follows no nodes."""

    def look_now(self) -> None:
        """Looks at nothing."""

    def give_up(self, node_id: str) -> None:
        """Knows no node."""

    def joining_until(self) -> float:
        """Returns minus infinity."""
        return -math.inf

    def forget(self) -> None:
        """Knows nothing to forget."""


class Lives:
    """What becomes of a pool's workers; once the steward's thread has begun, only that changes them.

    Args:
        rules: What it goes by.
        connection: The pool's.
        roster: The workers.
        exchange: Where their requests are.
        do: Has something done on the steward's thread.

    Attributes:
        lookout: Who follows the nodes.
        placement: Which device serves which models, of the nodes that were fielded last.
    """

    placement: Placement

    def __init__(
        self, rules: Rules, connection: Connection, roster: Roster, exchange: Exchange, do: Do
    ) -> None:
        self._rules, self._connection, self._do = rules, connection, do
        self._roster, self._exchange = roster, exchange
        self._coverage = Coverage(rules.openings, roster, exchange, rules.grace_s)
        self.lookout: Lookout = NoLookout()

    def next_wake(self) -> float:
        """Returns when `tend` has something to do."""
        rules, members = self._rules, [hand.member for hand in self._roster.hands]
        times = [member.start_again_at for member in members if member.state == "waiting"]
        times += [
            member.started_at + rules.start_timeout_s for member in members if member.state == "starting"
        ]
        return min(*times, self._coverage.next_wake(self.lookout.joining_until()), math.inf)

    def tend(self, now: float) -> None:
        """Does what is due."""
        for hand in self._roster.hands:
            self._tend_hand(hand, now)
        self._coverage.tend(now, self.lookout.joining_until())

    def _tend_hand(self, hand: Hand, now: float) -> None:
        member = hand.member
        if member.state == "waiting" and now >= member.start_again_at:
            self._start(hand)
        elif member.state == "starting" and now >= member.started_at + self._rules.start_timeout_s:
            self._end_start(hand)
        elif hand.is_retired and not self._exchange.ledger.seat(hand.number).sent:
            self._dismiss(hand, None)

    def end_stuck(self, number: int) -> None:
        """Ends a worker that has been at a request for too long."""
        hand = self._roster.hand(number)
        reason = f"it was at a request for more than {self._rules.run_timeout_s:g} s"
        self._bury(hand, died(hand.member.name, hand.member.pid, None, reason=reason))

    def end_all(self) -> None:
        """Ends every worker."""
        for hand in self._roster.hands:
            hand.member.state, hand.member.pid = "stopped", None
            _kill(hand.life)
            hand.life = None

    def begin_check(self, check: Check) -> None:
        """Has every ready worker run its golden samples."""
        check.begin(self._roster.ready(), self._do, self._replace)

    # Nodes.

    def field(self, joining: Sequence[Fielded]) -> None:
        """Starts workers on nodes that join.

        Raises:
            PoolError: A model that nobody serves fits nowhere.
        """
        places, self.placement = assign_models(joining, self._roster.count_copies())
        failed = [hand for hand in self._roster.hands if hand.member.state == "failed"]
        again = {one.node.node_id for one in joining}
        for hand in failed:
            if hand.post.node.node_id in again:
                self._dismiss(hand, hand.member.error)
        for place, post, models in places:
            self._add(place, post, models)
        self._settle()

    def _add(self, place: Fielded, post: Post, models: tuple[str, ...]) -> None:
        number = self._roster.next_number()
        member = Member(number, post.name, post.workplace, models, self._rules.max_restarts)
        self._exchange.add_worker(number, models)
        hand = Hand(member, post, place)
        self._roster.add(hand)
        self._start(hand)

    def drop_node(self, node_id: str, reason: str) -> None:
        """Lets go of the workers of a node that is gone."""
        for hand in self._roster.on(node_id):
            error = died(hand.member.name, hand.member.pid, None, reason=reason)
            self._dismiss(hand, error)
        self._settle()

    def retire_node(self, node_id: str) -> None:
        """Has the workers of a node end as soon as they have answered what they have."""
        for hand in self._roster.on(node_id):
            hand.is_retired = True
            self._exchange.close_worker(hand.number)
        self._settle()

    def _dismiss(self, hand: Hand, error: PipelineError | None) -> None:
        """Removes a worker for good."""
        _kill(hand.life)
        hand.life, hand.member.state, hand.member.error = None, "stopped", error
        lost = error or PoolError(f"{hand.member.name} was let go")
        outcomes = self._exchange.lose(hand.number, lost, is_blamed=True)
        self._roster.remove(hand)
        self._say(hand, error=error)
        tell(outcomes)

    # Lives.

    def _start(self, hand: Hand) -> None:
        self._connection.require()
        with self._roster.changing():
            hand.member.begin(time.monotonic())
        self._say(hand)
        life = Life(hand.member.name, hand.post, self._connection, partial(self._pass_on, hand))
        hand.life, hand.models, hand.opening = life, (), ()
        self._open(hand, life, hand.member.models)
        life.watch(lambda future: self._do(partial(self._ended, hand, life, future)))

    def _open(self, hand: Hand, life: Life, models: tuple[str, ...]) -> None:
        hand.opening = (*hand.opening, *models)
        job = build_job(hand.place, hand.post, models, self._rules.openings)
        life.open(job, lambda future: self._do(partial(self._opened, hand, life, models, future)))

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
        self._coverage.give_up(models, error)

    def _become_ready(self, hand: Hand, life: Life, models: tuple[str, ...], said: Mapping[str, Any]) -> None:
        member, hand.models = hand.member, (*hand.models, *models)
        with self._roster.changing():
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
            self._exchange.open_worker(hand.number, life, hand.models)
            self._coverage.recover(hand.models)
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
        self._do(partial(self._answered, hand, life, call, future))

    def _answered(self, hand: Hand, life: Life, call: Call, future: Future[Any]) -> None:
        if hand.life is not life:
            return
        error = future.exception()
        if error is None:
            results = future.result()
            outcomes, waited_s = self._exchange.answered(hand.number, life, call, results)
            self._count_refusals(hand, [outputs is None for outputs, _, _ in results])
            with self._roster.changing():
                hand.member.served += len(call.numbers)
                hand.member.latencies_s.extend(waited_s)
            tell(outcomes)
        elif is_death(error):
            self._find_dead(hand, error)
        else:
            tell(self._exchange.refuse(hand.number, life, call, failed(hand.member.name, error)))
            self._count_refusals(hand, [True] * len(call.numbers))

    def _count_refusals(self, hand: Hand, are_refused: Sequence[bool]) -> None:
        """Has a worker that refuses one request after the other run its golden samples."""
        for is_refused in are_refused:
            hand.member.refusals = hand.member.refusals + 1 if is_refused else 0
            if is_refused and hand.member.refusals % _REFUSALS == 0:
                Check().begin([hand], self._do, self._replace)

    def _ended(self, hand: Hand, life: Life, future: Future[Any]) -> None:
        error = future.exception()
        if hand.life is life and error is not None:
            self._find_dead(hand, error)

    def _find_dead(self, hand: Hand, problem: BaseException) -> None:
        self._bury(hand, died(hand.member.name, hand.member.pid, problem))
        if is_node_gone(problem) and hand.member.state == "waiting":
            hand.member.start_again_at += _NODE_PAUSE_S
        self.lookout.look_now()

    def _end_start(self, hand: Hand) -> None:
        """Ends a worker that is not ready in time, or that Ray never had room for."""
        within = f"within {self._rules.start_timeout_s:g} s"
        if hand.life is None or hand.life.has_begun:
            reason = f"it was not ready {within}"
            self._bury(hand, died(hand.member.name, hand.member.pid, None, reason=reason))
            return
        post = hand.post
        gpus = f" and {post.num_gpus:g} GPUs" if post.num_gpus else ""
        error = PoolError(
            f"{post.node.name} has no room for {hand.member.name}\n"
            f"  expected {post.num_cpus:g} CPUs{gpus} free {within}, got them reserved by others",
            hint="RaySessionPool(…, cpus_per_worker=…), or ray status",
        )
        self._bury(hand, error, is_hopeless=True, is_blamed=False)

    def _replace(self, hand: Hand, error: PipelineError) -> None:
        """Ends and replaces a worker that answers wrongly, which no request is to blame for."""
        self._bury(hand, error, is_blamed=False)

    def _bury(
        self, hand: Hand, error: PipelineError, *, is_hopeless: bool = False, is_blamed: bool = True
    ) -> None:
        """Takes note of a worker's death; it is started again unless that is hopeless."""
        _kill(hand.life)
        hand.life, hand.models, hand.opening = None, (), ()
        outcomes = self._exchange.lose(hand.number, error, is_blamed=is_blamed)
        with self._roster.changing():
            hand.member.die(time.monotonic(), error, is_hopeless=is_hopeless)
            self._roster.last_error = error
        level = logging.ERROR if hand.member.state == "failed" else logging.WARNING
        log.log(level, "%s", error.message)
        self._say(hand, error=error)
        if hand.is_retired:
            self._dismiss(hand, error)
        elif all(other.member.state == "failed" for other in self._roster.on(hand.post.node.node_id)):
            self.lookout.give_up(hand.post.node.node_id)
        self._settle()
        tell(outcomes)

    def _settle(self) -> None:
        for hand, model in self._coverage.settle():
            if hand.life is not None and hand.life.is_ready:
                self._open(hand, hand.life, (model,))

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


def _kill(life: Life | None) -> None:
    if life is not None:
        with suppress(Exception):  # what cannot be ended now ends with the driver
            life.kill()
