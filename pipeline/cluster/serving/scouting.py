"""Follows the cluster's nodes: those that join are asked what they have, those that left are let go."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.bundle.codec import encode
from pipeline.cluster.serving.fleet import Fielded, check_agreement, compare_nodes, field_node
from pipeline.cluster.serving.hands import Connection, tell_when_done, wait_for_shutdown
from pipeline.cluster.serving.nodes import ClusterNode, NodeChoice, parse_nodes
from pipeline.cluster.serving.posts import Wanted
from pipeline.cluster.serving.ray_errors import shorten
from pipeline.cluster.serving.steward import Steward
from pipeline.cluster.serving.survey import Errand, Survey, read_survey, survey_node
from pipeline.errors import PipelineError, PoolClosedError, PoolError
from pipeline.versions import parse_version

log = logging.getLogger(__name__)

_AGAIN_S = 30.0
"""Seconds until a node that could not be used is asked again."""

_LEAVING_S, _LOOK_S = 5.0, 0.1
"""Seconds for the cluster to notice that a node is lost which did not answer, and between two looks."""

_SHOWS_GPUS = (2, 60)


@dataclass(frozen=True)
class Terms:
    """Which nodes are used, and for what.

    Attributes:
        choice: Which of the cluster's.
        wanted: What workers each gets.
        errand: What it is asked.
        poll_s: Seconds between two looks at the cluster.
    """

    choice: NodeChoice
    wanted: Wanted
    errand: Errand
    poll_s: float


def list_nodes() -> tuple[ClusterNode, ...]:
    """Returns the nodes of the cluster that are alive."""
    list_all: Any = ray.nodes
    return parse_nodes(list_all())


def ask_node(node: ClusterNode, errand: Errand) -> Any:
    """Has a node pull the bundles, unless it has them, and returns Ray's reference to what it says."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(survey_node)
    affinity = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return task.options(scheduling_strategy=affinity, **show_gpus(ray.__version__)).remote(encode(errand))


def show_gpus(version: str) -> dict[str, Any]:
    """Returns the options with which a task that reserves no GPU sees those of its node.

    Ray 2.50 hides them from it unless its process has a variable of Ray's; 2.60 does not.

    Args:
        version: Ray's.
    """
    if (parse_version(version) or ()) >= _SHOWS_GPUS:
        return {}
    return {"runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}}


def field_first(
    terms: Terms, *, max_nodes: float, timeout_s: float, may_miss: bool
) -> tuple[list[Fielded], dict[str, PipelineError]]:
    """Asks the nodes that are there when a pool begins, all at once, and others where these fail.

    Args:
        terms: Which, and for what.
        max_nodes: How many at most.
        timeout_s: Seconds within which they must have answered.
        may_miss: Whether the pool may begin without those that are there and cannot be used.

    Returns:
        The nodes to be used, and what is wrong with the others, by their ids.

    Raises:
        PipelineError: There is none, or one cannot be used that may not be missed, and has not left the
            cluster since.
    """
    until = time.monotonic() + timeout_s
    alive = list_nodes()
    candidates = deque(compare_nodes((), alive, terms.choice).joined)
    if not candidates:
        raise PoolError(
            f"no node for the pool\n  expected one with {_describe(terms.choice)}, got {len(alive)} others",
            hint="ray status",
        )
    fielded: list[Fielded] = []
    wrong: dict[str, PipelineError] = {}
    while candidates and len(fielded) < max_nodes:
        room = int(min(max_nodes - len(fielded), len(candidates)))
        chosen = [candidates.popleft() for _ in range(room)]
        for node, answer in [(node, ask_node(node, terms.errand)) for node in chosen]:
            try:
                survey = _read(node, answer.future(), max(0.0, until - time.monotonic()))
                if fielded:
                    check_agreement(fielded[0].survey, survey, node)
                fielded.append(field_node(node, survey, terms.wanted))
            except PipelineError as error:
                if not may_miss and not _has_left(node, error):
                    raise
                log.warning("%s", error.message)
                wrong[node.node_id] = error
    if not fielded:
        raise next(iter(wrong.values()))
    return fielded, wrong


def _has_left(node: ClusterNode, error: PipelineError) -> bool:
    """Says whether a node that did not answer has left the cluster, which may be noticed a moment later."""
    problem = error.__cause__
    may_leave = isinstance(problem, ray.exceptions.RayError)
    is_its_word = isinstance(problem, ray.exceptions.RayTaskError)
    until = time.monotonic() + (_LEAVING_S if may_leave and not is_its_word else 0.0)
    with suppress(Exception):  # where Ray says no more, what the node said counts
        while node.node_id in {one.node_id for one in list_nodes()}:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True
    return False


def _describe(choice: NodeChoice) -> str:
    devices = {"all": "CPUs or GPUs", "cpu": "CPUs", "cuda": "GPUs"}[choice.devices]
    labels = ", ".join(f"{key}={value}" for key, value in choice.labels.items())
    return f"{devices} and labels {labels}" if labels else devices


def _read(node: ClusterNode, future: Future[Any], timeout_s: float) -> Survey:
    try:
        said = future.result(min(timeout_s, threading.TIMEOUT_MAX))
    except TimeoutError:
        raise PoolError(
            f"{node.name} did not say what it has\n  expected an answer within {timeout_s:.0f} s",
            hint="RaySessionPool(…, start_timeout_s=…): the first to ask has a node pull the bundle",
        ) from None
    except ray.exceptions.RayError as error:
        lines = "\n".join(f"  {line}" for line in shorten(str(error))[-3:])
        raise PoolError(f"{node.name} cannot say what it has\n{lines}", hint="ray status") from error
    return read_survey(said, node.name)


@dataclass(frozen=True, eq=False)
class _Asking:
    """One asking of a node, which is not another of the same node."""

    until: float


class Scout:
    """Looks at the cluster's nodes every so often, and has the steward act on what changed.

    Args:
        steward: Whose pool it is; all but the looking is done on its thread.
        connection: The pool's.
        terms: Which nodes are used, and for what.
        first: The nodes that the pool begins with.
        wrong: Ids of those that it began without.
        max_nodes: How many nodes at most.
        answer_s: Seconds that a node which was asked may take, as long as requests wait for it.
        list_alive: Returns the cluster's nodes.
    """

    def __init__(
        self,
        steward: Steward,
        connection: Connection,
        terms: Terms,
        first: Sequence[Fielded],
        wrong: Sequence[str] = (),
        *,
        max_nodes: float = math.inf,
        answer_s: float,
        list_alive: Callable[[], Sequence[ClusterNode]] = list_nodes,
    ) -> None:
        self._steward, self._connection, self._terms = steward, connection, terms
        self._lives = steward.lives
        self._list_alive = list_alive
        self._max_nodes, self._answer_s = max_nodes, answer_s
        self._survey = first[0].survey
        self._used: dict[str, str] = {one.node.node_id: one.node.name for one in first}
        self._again_at = dict.fromkeys(wrong, time.monotonic() + _AGAIN_S)
        self._asked: dict[str, _Asking] = {}
        self._renew_events()
        self._thread = threading.Thread(target=self._look, name="ortprep-ray-scout", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._lives.lookout = self
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._ended.set()
        self._look_at_once.set()

    def limit(self, max_nodes: float) -> None:
        """Uses at most so many nodes from now on."""
        self._max_nodes = max_nodes
        self._look_at_once.set()

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the nodes that are used, or are asked whether they can be."""
        return tuple(self._used.values())

    def _look(self) -> None:
        while not self._ended.is_set():
            self._look_at_once.wait(min(self._terms.poll_s, threading.TIMEOUT_MAX))
            self._look_at_once.clear()
            if self._ended.is_set():
                return
            try:
                self._connection.require()
            except ray.exceptions.RayError as error:
                wait_for_shutdown()
                self._steward.exchange.gate.close(PoolClosedError(f"pool is closed\n  {error}"))
                self._steward.stop_soon()
                return
            try:
                alive = self._list_alive()
            except Exception as error:  # noqa: BLE001 - whatever keeps Ray from answering now, it is asked again
                log.warning("cannot list the cluster's nodes: %s", error)
                continue
            self._steward.do(partial(self._compare, alive))

    def _compare(self, alive: Sequence[ClusterNode]) -> None:
        now = time.monotonic()
        for node_id in self._again_at.keys() - {node.node_id for node in alive}:
            del self._again_at[node_id]
            self._lives.drop_node(node_id, "its node left the cluster")  # those that were given up there
        eligible = [node for node in alive if self._again_at.get(node.node_id, now) <= now]
        change = compare_nodes(tuple(self._used), eligible, self._terms.choice, self._max_nodes)
        for node_id in change.lost:
            name = self._used.pop(node_id)
            self._asked.pop(node_id, None)
            log.warning("node %s left the cluster", name)
            self._lives.drop_node(node_id, "its node left the cluster")
        for node_id in change.surplus:
            log.info("node %s is let go", self._used.pop(node_id))
            self._asked.pop(node_id, None)
            self._lives.retire_node(node_id)
        for node in change.joined:
            log.info("node %s joins", node.name)
            self._used[node.node_id] = node.name
            self._again_at.pop(node.node_id, None)
            asking = self._asked[node.node_id] = _Asking(now + self._answer_s)
            asked = ask_node(node, self._terms.errand)
            tell_when_done(asked, partial(self._pass_on, node, asking))

    def _pass_on(self, node: ClusterNode, asking: _Asking, future: Future[Any]) -> None:
        self._steward.do(partial(self._surveyed, node, asking, future))

    def _surveyed(self, node: ClusterNode, asking: _Asking, future: Future[Any]) -> None:
        if self._asked.get(node.node_id) is not asking:
            return  # it was let go meanwhile, and may have been asked again
        del self._asked[node.node_id]
        try:
            survey = _read(node, future, 0.0)
            check_agreement(self._survey, survey, node)
            self._lives.field([field_node(node, survey, self._terms.wanted)])
        except PipelineError as error:
            log.warning("node %s is not used: %s", node.name, error.message)
            self._steward.roster.last_error = error
            self.give_up(node.node_id)

    # What the keepers of workers say; also on the steward's thread.

    def look_now(self) -> None:
        """Looks at the nodes, after a death that may be one of a node."""
        self._look_at_once.set()

    def give_up(self, node_id: str) -> None:
        """Uses a node no more, for some time."""
        if self._used.pop(node_id, None) is not None:
            self._again_at[node_id] = time.monotonic() + _AGAIN_S
            self._look_at_once.set()  # another may take its place

    def joining_until(self) -> float:
        """Returns until when a node that was asked may yet join; minus infinity if none was."""
        return max((asking.until for asking in self._asked.values()), default=-math.inf)

    def forget(self) -> None:
        """Has new events, in a fork of the process: the old ones may be locked."""
        self._renew_events()

    def _renew_events(self) -> None:
        self._look_at_once, self._ended = threading.Event(), threading.Event()
