"""What jobs call: `RaySessionPool`, the devices of every node of a Ray cluster behind one `run`."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import ray
from ray.util.client import ray as client

from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.hands import ObjectStore, read_connection
from pipeline.cluster.serving.lives import Rules
from pipeline.cluster.serving.nodes import NodeChoice, choose_devices
from pipeline.cluster.serving.opened_model import Opening
from pipeline.cluster.serving.packing import SMALL_BYTES
from pipeline.cluster.serving.pinning import pin_bundle
from pipeline.cluster.serving.posts import Wanted
from pipeline.cluster.serving.scouting import Scout, Terms, field_first
from pipeline.cluster.serving.steward import Steward
from pipeline.cluster.serving.survey import Errand
from pipeline.errors import PoolClosedError, PoolError, RequestTimeoutError
from pipeline.runtime.loading.bundle_loader import DigestPolicy, check_choice
from pipeline.runtime.loading.variant_selection import FASTEST, PRECISIONS
from pipeline.runtime.pool.calls import PoolCalls
from pipeline.runtime.pool.crew import PoolStats, WorkerEvent
from pipeline.runtime.pool.futures import renew
from pipeline.runtime.pool.numbers import require_counts, require_positive
from pipeline.runtime.pool.placement import Placement
from pipeline.runtime.pool.requests import read_signature

Bundle = str | os.PathLike[str]

_LAST_WAIT_S = 30.0


class RaySessionPool(PoolCalls):
    """Sessions of one or several bundles, in an actor per device of every node of a Ray cluster.

    It has the interface of `pipeline.runtime.SessionPool`; docs/ray_serving.md lists what differs. Nodes that
    join the cluster are taken up, and those that leave it are let go, while requests are in flight.

    Args:
        bundles: A bundle that every node can reach, or several by the name that requests call them by: a
            folder of a shared file system, or a reference to a registry, which each node pulls once.
        devices: `all` (the GPUs of a node, or its CPUs where it has none), `cpu` or `cuda`.
        workers_per_device: Actors on each device.
        target: Take only variants prepared for this target; None for what fits the device.
        min_ready: Return as soon as so many workers are ready; None for all of them. 0 waits for none.
        start_timeout_s: Seconds within which nodes must have pulled, and workers be ready.
        run_timeout_s: Seconds that one run may take; a worker that takes longer is ended and replaced.
        max_pending: Requests that may be unanswered at a time; who brings another waits.
        max_restarts: How often a worker is started again in a row, without an answer or half a minute of
            peace between its deaths, until it is given up.
        threads: Threads per worker; None for as many as processors are reserved for it.
        digests: As `load` takes it.
        precision: As `load` takes it.
        buckets: Whether workers also load the variants for batches of certain sizes.
        require_signature: As `load` takes it, of every bundle; a key's file must be there on every node.
        observer: Called with everything that happens to workers, on a thread of the pool.
        cpus_per_worker: Processors that Ray reserves for each; None for those of the node divided among its
            workers, and one for each worker of a GPU.
        labels: Labels that a node must have to be used.
        max_nodes: Most nodes to use; None for all.
        max_batch: Most small requests that travel in one actor call.
        grace_s: Seconds for which requests wait for a node to join, where no worker is left for their model.
        poll_s: Seconds between two looks at the cluster's nodes.

    Raises:
        PipelineError: A bundle cannot be reached from a node, or fewer than `min_ready` workers became ready;
            then what the first of the others said, with its node and name.
        PoolError: Ray is not initialised, the cluster has no such node, or the arguments contradict each
            other.
        WorkerDiedError: A worker died before it was ready.
    """

    def __init__(
        self,
        bundles: Bundle | Mapping[str, Bundle],
        *,
        devices: str = "all",
        workers_per_device: int = 1,
        target: str | None = None,
        min_ready: int | None = None,
        start_timeout_s: float = 600.0,
        run_timeout_s: float = 300.0,
        max_pending: int = 1024,
        max_restarts: int = 5,
        threads: int | None = None,
        digests: DigestPolicy = "changed",
        precision: str = FASTEST,
        buckets: bool = True,
        require_signature: Bundle | None = None,
        observer: Callable[[WorkerEvent], None] | None = None,
        cpus_per_worker: float | None = None,
        labels: Mapping[str, str] | None = None,
        max_nodes: int | None = None,
        max_batch: int = 16,
        grace_s: float = 30.0,
        poll_s: float = 1.0,
    ) -> None:
        check_choice("precision", precision, (FASTEST, *PRECISIONS))
        check_choice("digests", digests, ("changed", "full", "off"))
        require_counts(
            workers_per_device=workers_per_device,
            max_pending=max_pending,
            threads=threads,
            max_nodes=max_nodes,
            max_batch=max_batch,
        )
        require_counts(least=0, min_ready=min_ready, max_restarts=max_restarts)
        require_positive(
            start_timeout_s=start_timeout_s,
            run_timeout_s=run_timeout_s,
            cpus_per_worker=cpus_per_worker,
            poll_s=poll_s,
        )
        require_positive(or_zero=True, grace_s=grace_s)
        choice = NodeChoice(choose_devices(devices), dict(labels or {}))
        _require_ray()
        connection = read_connection()
        signature = None if require_signature is None else os.fspath(require_signature)
        pinned = _pin_all(bundles, signature)
        terms = Terms(
            choice=choice,
            wanted=Wanted(devices, workers_per_device, cpus_per_worker, threads),
            errand=Errand(pinned, workers_per_device, precision, buckets, signature),
            poll_s=poll_s,
        )
        most = math.inf if max_nodes is None else max_nodes
        first, wrong = field_first(
            terms, max_nodes=most, timeout_s=start_timeout_s, may_miss=min_ready is not None
        )
        models = first[0].survey.models
        signatures = {model.name: read_signature(model.name, model.config) for model in models}
        opening = Opening(
            bundle="",
            target=target,
            precision=precision,
            digests=digests,
            require_signature=signature,
            buckets=buckets,
        )
        rules = Rules(
            openings={
                model.name: opening.of(bundle) for model, bundle in zip(models, pinned.values(), strict=True)
            },
            start_timeout_s=start_timeout_s,
            run_timeout_s=run_timeout_s,
            max_restarts=max_restarts,
            grace_s=grace_s,
            observer=observer,
        )

        def make_exchange(wake: Callable[[], None]) -> Exchange:
            return Exchange(signatures, ObjectStore(connection), max_pending, max_batch, wake)

        self._steward = Steward(rules, connection, make_exchange)
        self._exchange = self._steward.exchange
        super().__init__(signatures, self._exchange, long_copy_bytes=SMALL_BYTES)
        self._scout = Scout(
            self._steward,
            connection,
            terms,
            first,
            tuple(wrong),
            max_nodes=most,
            answer_s=start_timeout_s,
        )
        self._steward.roster.last_error = next(iter(wrong.values()), None)
        # The threads hold these and not the pool, so that a pool that is forgotten ends its workers.
        self._finalizer = weakref.finalize(self, _stop_soon, self._scout, self._steward)
        try:
            self._steward.lives.field(first)
            self._steward.start()
            self._scout.start()
            self._steward.roster.wait_ready(min_ready)
        except BaseException:
            self.close(drain=False)
            raise

    @property
    def placement(self) -> Placement:
        """Which device serves which models, of the nodes that were fielded last, and why."""
        return self._steward.lives.placement

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that are used, or are asked whether they can be."""
        return self._scout.used

    def scale(self, max_nodes: int | None) -> None:
        """Uses at most so many nodes from now on; None for all that the cluster has.

        Returns at once. Workers of nodes that are let go first answer what they have; of those that are taken
        up, `wait_ready` waits for.

        Raises:
            PoolError: It is no whole number from 1.
        """
        require_counts(max_nodes=max_nodes)
        self._scout.limit(math.inf if max_nodes is None else max_nodes)

    def check(self, timeout_s: float | None = None) -> dict[str, str]:
        """Has every ready worker run its golden samples again; one that answers wrongly is replaced.

        Args:
            timeout_s: Seconds to wait; None as long as it takes.

        Returns:
            What was wrong, by worker's name; empty if nothing was.

        Raises:
            RequestTimeoutError: Some had not said by then.
            PipelineError: The pool is closed, or was before all had said.
        """
        self._exchange.gate.refuse_in_callback("check()")
        check = self._steward.begin_check()
        if not check.done.wait(timeout_s):
            raise RequestTimeoutError(f"check took too long\n  expected an end within {timeout_s:g} s")
        if check.error is not None:
            raise renew(check.error)
        return dict(check.wrong)

    def wait_ready(self, count: int | None = None, *, timeout_s: float | None = None) -> None:
        """Waits until so many workers are ready; None for all there are now.

        A count may be more than there are: nodes may join.

        Raises:
            RequestTimeoutError: They were not by then.
            PipelineError: The pool is closed; or, without a count, one was given up: what it said.
        """
        require_counts(least=0, count=count)
        self._steward.roster.wait_ready(count, timeout_s=timeout_s, may_join=True)

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing.

        Nothing lies in shared memory of the pool's own: `shared_bytes` and `used_bytes` are 0.
        """
        return self._steward.roster.stats()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Takes no more requests, and ends the workers.

        Args:
            drain: Whether requests that were taken are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        if drain:
            self._exchange.gate.refuse_in_callback("close()")
        self._exchange.gate.close(PoolClosedError("pool is closed", hint="make a new one: RaySessionPool(…)"))
        try:
            if drain:
                self._exchange.wait_idle(timeout_s)
        finally:
            self._scout.stop()
            self._steward.stop(_LAST_WAIT_S)
            self._finalizer.detach()

    def __enter__(self) -> RaySessionPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _count_workers(self, model: str | None = None) -> int:
        return self._steward.roster.count(model)

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        del timeout_s
        array = np.asarray(value)
        if array.nbytes <= SMALL_BYTES or array.dtype != self._signatures[model].inputs[name]:
            return array
        return self._exchange.inputs.share(array)


def _stop_soon(scout: Scout, steward: Steward) -> None:
    scout.stop()
    steward.stop_soon()


def _require_ray() -> None:
    if not ray.is_initialized():
        raise PoolError(
            "Ray is not initialised\n  expected a driver that is connected to a cluster",
            hint="ray.init(address='auto')   (ray.init() alone starts a cluster of this one machine)",
        )
    if client.is_connected():
        raise PoolError(
            "a pool cannot be used through Ray Client\n  expected a driver on a node, got one of ray://",
            hint="ray job submit -- python …   (runs it in the cluster)",
        )


def _pin_all(bundles: Bundle | Mapping[str, Bundle], signature: str | None) -> dict[str, str]:
    if not isinstance(bundles, Mapping):
        return {"": pin_bundle(bundles, require_signature=signature)}
    if not bundles:
        raise PoolError("no bundle for the pool\n  expected at least one")
    return {str(name): pin_bundle(path, require_signature=signature) for name, path in bundles.items()}
