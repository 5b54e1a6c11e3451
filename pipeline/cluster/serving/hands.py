"""An actor as the steward knows it: over all its lives, and in the one it has."""

from __future__ import annotations

import functools
import os
import time
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

_SHUTDOWN_S = 1.0

Done = Callable[[Any], None]
"""Called with the `concurrent.futures.Future` of a call, on a thread of Ray's: it must be short."""


@dataclass(frozen=True)
class Connection:
    """This process's connection to a cluster.

    Attributes:
        pid: The process.
        job_id: Ray's, unique in the cluster.
        node_id: The node that it is connected by; every local cluster counts its jobs from 1 again.
    """

    pid: int
    job_id: str
    node_id: str

    def require(self) -> None:
        """Checks that it is there still; Ray itself would start another cluster at the next call.

        Raises:
            RaySystemError: Ray was shut down, or this is a fork of the process.
        """
        if self.pid != os.getpid():
            raise ray.exceptions.RaySystemError("this is a fork of the process that is connected to Ray")
        if not ray.is_initialized():
            raise ray.exceptions.RaySystemError("Ray was shut down")
        if read_connection() != self:
            raise ray.exceptions.RaySystemError("Ray was shut down, and initialised again since")


def read_connection() -> Connection:
    """Returns the connection that there is; Ray must be initialised."""
    context: Any = ray.get_runtime_context()
    return Connection(os.getpid(), context.get_job_id(), context.get_node_id())


def wait_for_shutdown() -> None:
    """Waits while another thread of this process shuts Ray down or initialises it.

    Ray ends the process where a reference is let go of meanwhile, and says that it is disconnected before.
    """
    lock = getattr(ray._private.worker, "_connect_or_shutdown_lock", None)  # what ray.shutdown itself holds
    if lock is None:
        time.sleep(_SHUTDOWN_S)
    else:
        with lock:
            pass


def tell_when_done(reference: Any, done: Done) -> None:
    """Has a function called with what comes of a call.

    It gets a future of its own. Ray's holds the reference, which is let go of here, on Ray's thread, and not
    on one that may do so while Ray is shut down.
    """

    def settle(of_ray: Any) -> None:
        plain: Future[Any] = Future()
        error = of_ray.exception()
        if error is None:
            plain.set_result(of_ray.result())
        else:
            plain.set_exception(error)
        done(plain)

    reference.future().add_done_callback(settle)


class ObjectStore:
    """Ray's object store, as the exchange uses it.

    Args:
        connection: The pool's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, array: Array) -> Any:
        """Returns a reference to a copy of an array.

        Raises:
            PoolClosedError: Ray was shut down.
            NoRoomError: It is full, and so is the disk that it spills to.
            PoolError: Ray cannot take it for another reason.
        """
        try:
            self._connection.require()
        except ray.exceptions.RayError as error:
            raise PoolClosedError(f"pool is closed\n  {error}") from None
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
        connection: The pool's.
        answered: Called with every call and its future.

    Attributes:
        has_begun: Whether its process is known to be there; Ray may have no room for it yet.
        is_ready: Whether it has opened its models.
    """

    def __init__(
        self, name: str, post: Post, connection: Connection, answered: Callable[[Life, Call, Any], None]
    ) -> None:
        self.name = name
        self.has_begun = self.is_ready = False
        self._connection = connection
        self._answered = answered
        options = _actor_class().options(
            num_cpus=post.num_cpus,
            num_gpus=post.num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(post.node.node_id, soft=False),
        )
        self._actor = options.remote()

    def watch(self, ended: Done) -> None:
        """Has a function called when the actor is gone."""
        tell_when_done(self._actor.greet.options(concurrency_group=WATCH).remote(), self._greeted)
        tell_when_done(self._actor.watch.options(concurrency_group=WATCH).remote(), ended)

    def _greeted(self, future: Future[Any]) -> None:
        self.has_begun = self.has_begun or future.exception() is None

    def open(self, job: dict[str, Any], opened: Done) -> None:
        """Opens models, behind the calls that were made before."""
        tell_when_done(self._actor.open.remote(job), opened)

    def check(self, checked: Done) -> None:
        """Runs the golden samples, behind the calls that were made before."""
        tell_when_done(self._actor.check.remote(), checked)

    def send(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Makes a call; whatever comes of it, `answered` is told."""
        try:
            tell_when_done(self._call(call, requests), lambda future: self._answered(self, call, future))
        except BaseException as error:  # also a signal's: others may wait for what is in this call
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._answered(self, call, failed)
            if not isinstance(error, Exception):
                raise

    def _call(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> Any:
        self._connection.require()
        if call.is_large:
            model, arrays = requests[0]
            # Ray brings what references stand for to the node only where they are arguments themselves.
            return self._actor.run_large.remote(model, *arrays)
        return self._actor.run.remote(requests)

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._connection.require()
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
