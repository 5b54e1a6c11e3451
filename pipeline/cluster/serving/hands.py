"""An actor as the steward knows it: over all its lives, and in the one it has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.cluster.serving.fleet import Fielded
from pipeline.cluster.serving.packing import Call
from pipeline.cluster.serving.posts import Post
from pipeline.cluster.serving.session_actor import WATCH, SessionActor
from pipeline.errors import PoolClosedError, PoolError
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.arena import NoRoomError
from pipeline.runtime.pool.crew import Member

Done = Callable[[Any], None]
"""Called with the `concurrent.futures.Future` of a call, on a thread of Ray's: it must be short."""


def require_connection() -> None:
    """Checks that there still is a cluster; Ray itself would start another at the next call.

    Raises:
        RaySystemError: It was shut down.
    """
    if not ray.is_initialized():
        raise ray.exceptions.RaySystemError("Ray was shut down")


class ObjectStore:
    """Ray's object store, as the exchange uses it."""

    def put(self, array: Array) -> Any:
        """Returns a reference to a copy of an array.

        Raises:
            PoolClosedError: Ray was shut down.
            NoRoomError: It is full, and so is the disk that it spills to.
            PoolError: Ray cannot take it for another reason.
        """
        if not ray.is_initialized():
            raise PoolClosedError("pool is closed\n  Ray was shut down")
        try:
            return ray.put(array)
        except ray.exceptions.ObjectStoreFullError as error:
            raise NoRoomError(
                f"Ray's object store is full\n  expected {array.nbytes} bytes free",
                hint="let go of answers, or ray memory",
            ) from error
        except ray.exceptions.RayError as error:
            raise PoolError(f"Ray's object store takes no array\n  {error}", hint="ray status") from error

    def view(self, reference: Any) -> Array:
        """Returns the array of the object store, which nobody may write to."""
        array: Array = ray.get(reference)
        return array


@functools.cache
def _actor_class() -> Any:
    # It is started again by the steward, who knows what it had and how often it died.
    remote: Any = ray.remote
    return remote(concurrency_groups={WATCH: 1}, max_restarts=0, max_task_retries=0)(SessionActor)


class Life:
    """One process of an actor, from its start to its end.

    Args:
        name: Of the worker.
        post: Where it is.
        answered: Called with every call and its future.
    """

    def __init__(self, name: str, post: Post, answered: Callable[[Life, Call, Any], None]) -> None:
        self.name = name
        self.is_ready = False
        self._answered = answered
        options = _actor_class().options(
            num_cpus=post.num_cpus,
            num_gpus=post.num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(post.node.node_id, soft=False),
        )
        self._actor = options.remote()

    def watch(self, ended: Done) -> None:
        """Has a function called when the actor is gone."""
        self._actor.watch.options(concurrency_group=WATCH).remote().future().add_done_callback(ended)

    def open(self, job: dict[str, Any], opened: Done) -> None:
        """Opens models, behind the calls that were made before."""
        self._actor.open.remote(job).future().add_done_callback(opened)

    def check(self, checked: Done) -> None:
        """Runs the golden samples, behind the calls that were made before."""
        self._actor.check.remote().future().add_done_callback(checked)

    def send(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Makes a call; whatever comes of it, `answered` is told."""
        try:
            future = self._call(call, requests)
        except Exception as error:  # noqa: BLE001 - a call that cannot be made is one that fails
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda future: self._answered(self, call, future))

    def _call(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> Future[Any]:
        require_connection()
        if call.is_large:
            model, arrays = requests[0]
            # Ray brings what references stand for to the node only where they are arguments themselves.
            reference = self._actor.run_large.remote(model, *arrays)
        else:
            reference = self._actor.run.remote(requests)
        future: Future[Any] = reference.future()
        return future

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        ray.kill(self._actor, no_restart=True)


@dataclass
class Hand:
    """A worker.

    Attributes:
        member: Its name, figures and restarts.
        post: Where it is.
        place: The node of that.
        life: Its process; None without one.
        models: Those that it has opened in this life.
        opening: Those that it is opening.
        is_retired: Whether it ends as soon as it has answered what it has.
    """

    member: Member
    post: Post
    place: Fielded
    life: Life | None = None
    models: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
    is_retired: bool = False

    @property
    def number(self) -> int:
        """Unique in the pool."""
        return self.member.number
