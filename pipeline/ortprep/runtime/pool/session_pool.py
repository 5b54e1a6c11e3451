"""What jobs call: `SessionPool`, every device of a node behind one `run`."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from types import TracebackType
from typing import Any

from ortprep.errors import InvalidRequestError, PoolClosedError, PoolError
from ortprep.runtime.loading.session import keep_freed_memory
from ortprep.runtime.loading.variant_resolver import read_trusted_config
from ortprep.runtime.machine.memory import free_bytes
from ortprep.runtime.pool.broker import RequestBroker, RequestOptions
from ortprep.runtime.pool.config import Bundle, PoolConfig, name_bundles, plan_workers
from ortprep.runtime.pool.memory import RegionTable
from ortprep.runtime.pool.slots import MAX_DEPTH, Answer, PoolFuture
from ortprep.runtime.pool.supervisor import Supervisor
from ortprep.runtime.pool.worker_state import PoolStats
from ortprep.runtime.tensors.signatures import read_signature

_SHARE_OF_MEMORY = 0.5
_STOP_GRACE_S = 10.0
_LONG_COPY_BYTES = 2**20


class SessionPool:
    """Sessions of one or several bundles, in one process per device; all processes start at once.

    It may be used from many threads. Large arrays travel through shared memory. Answers are ordinary arrays.
    It needs Linux.

    Args:
        bundles: A bundle's folder or registry reference, as `load` takes it, or several by the names that
            requests use.
        config: The settings; None for the defaults.

    Raises:
        PipelineError: The bundles cannot be read, or fewer than `min_ready` workers became ready; then the
            first error of the ones that failed, as `load` would have raised it.
        PoolError: There are no such devices, no memory, or a model cannot be served through shared memory.
        WorkerDiedError: A worker died before it was ready.
    """

    def __init__(self, bundles: Bundle | Mapping[str, Bundle], config: PoolConfig | None = None) -> None:
        config = config or PoolConfig()
        paths = name_bundles(bundles, config.require_signature)
        configs = {name: read_trusted_config(path, config.require_signature) for name, path in paths.items()}
        signatures = {name: read_signature(name, loader_config) for name, loader_config in configs.items()}
        workers, self.placement = plan_workers(paths, configs, config)
        min_ready = len(workers) if config.min_ready is None else config.min_ready
        if min_ready > len(workers):
            raise PoolError(f"bad min_ready\n  expected 0 to {len(workers)}, got {min_ready}")
        shared_bytes = config.max_shared_bytes or max(2**20, int(free_bytes() * _SHARE_OF_MEMORY))
        memory = RegionTable(MAX_DEPTH * len(workers), shared_bytes)
        try:
            self._broker = RequestBroker(signatures, memory, config.max_pending)
            self._supervisor = Supervisor(workers, config, self._broker)
        except OSError as error:
            memory.close()
            raise PoolError(f"cannot make a pool\n  {error}", hint="ulimit -n") from error
        self._signatures = signatures
        keep_freed_memory()  # for the arrays of answers
        # The thread holds the supervisor and not this, so that a pool that is forgotten ends its workers.
        self._finalizer = weakref.finalize(self, self._broker.wakeup.stop_soon)
        self._finalizer.atexit = False  # the supervisors' own, which waits
        self._supervisor.start()
        try:
            self._supervisor.wait_ready(min_ready)
        except BaseException:  # an interrupt, too, must leave no worker
            self.close(drain=False)
            raise

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> Answer:
        """Runs a model and returns its outputs by name, in the model's order.

        Args:
            inputs: Arrays by input name, of the model's types.
            model: Which one, if the pool has several.
            timeout_s: Seconds after which to give up; None waits as long as it takes.
            retries: How often the request may be tried on another worker after one died of it.

        Raises:
            InvalidRequestError: The inputs do not fit the model.
            RunError: ONNX Runtime refused the request.
            RequestTimeoutError: The deadline passed.
            WorkerDiedError: The worker died while it ran the request.
            PoolClosedError: The pool was closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        self._broker.refuse_in_callback("run()")
        return self.submit(inputs, model=model, timeout_s=timeout_s, retries=retries).result()

    def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> PoolFuture:
        """Does what `run` does, and returns a future at once, or as soon as there is room.

        Callbacks of the future are run on a thread of the pool and must not wait for it.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            RequestTimeoutError: There was no room before the deadline.
            PoolClosedError: The pool is closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        name = self._model(model)
        future = self._broker.submit(name, inputs, RequestOptions(timeout_s, retries))
        assert future is not None  # it may wait
        return future

    async def arun(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> Answer:
        """Does what `run` does, for asyncio; cancelling it cancels the request if no worker has it yet.

        A request that is cancelled while it waits for room is withdrawn as soon as it gets some.

        Raises:
            PoolError: As `run`.
        """
        name = self._model(model)
        request = RequestOptions(timeout_s, retries, may_wait=False)
        is_small = sum(getattr(value, "nbytes", 0) for value in inputs.values()) <= _LONG_COPY_BYTES
        future = self._broker.submit(name, inputs, request) if is_small else None
        if future is None:  # the loop must not wait, be it for room or for a long copy
            request.may_wait = True
            submitting = asyncio.ensure_future(asyncio.to_thread(self._broker.submit, name, inputs, request))
            try:
                future = await asyncio.shield(submitting)
            except asyncio.CancelledError:
                request.may_wait = False
                submitting.add_done_callback(_take_back)
                raise
        assert future is not None  # it may wait
        return await asyncio.wrap_future(future)

    def map(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        model: str | None = None,
        ordered: bool = True,
        in_flight: int | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> Iterator[Answer]:
        """Runs many requests, a bounded number at a time, and yields their answers.

        Args:
            batches: Inputs of each request; read as answers are consumed, so it may be endless.
            model: Which one, if the pool has several.
            ordered: Whether answers come in the order of their requests, or as they are ready.
            in_flight: Maximum number of requests at a time; None for four per worker.
            timeout_s: As `run` takes it, of each request.
            retries: As `run` takes it.

        Raises:
            PoolError: As `run`, for the first request that fails; later ones are withdrawn.
        """
        name = self._model(model)
        futures: deque[PoolFuture] = deque()
        try:
            for batch in batches:
                futures.append(self.submit(batch, model=name, timeout_s=timeout_s, retries=retries))
                if len(futures) >= (in_flight or max(8, 4 * len(self._supervisor.workers))):
                    yield _take(futures, ordered=ordered)
            while futures:
                yield _take(futures, ordered=ordered)
        finally:
            for future in futures:
                future.cancel()

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._signatures)

    def wait_ready(self, count: int | None = None) -> None:
        """Waits until this many workers are ready; None for all.

        Raises:
            PipelineError: They never will be ready.
        """
        self._supervisor.wait_ready(len(self._supervisor.workers) if count is None else count)

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing."""
        return self._supervisor.stats()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accepts no more requests, ends the workers, and removes the shared memory.

        Args:
            drain: Whether accepted requests are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        if drain:
            self._broker.refuse_in_callback("close()")
        grace_s = 0.0
        try:
            self._broker.close(PoolClosedError("pool is closed", hint="make a new one: SessionPool(…)"))
            if drain and self._broker.wait_idle(timeout_s):
                grace_s = _STOP_GRACE_S
        finally:  # also where a signal's handler raises
            self._broker.wakeup.stop_soon(grace_s)
        self._supervisor.stop(grace_s=grace_s)
        self._finalizer.detach()

    def __enter__(self) -> SessionPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _model(self, model: str | None) -> str:
        """Returns the name of a model of the pool; None stands for its only one."""
        if model is None and len(self._signatures) == 1:
            return next(iter(self._signatures))
        if model is None or model not in self._signatures:
            got = "none" if model is None else repr(model)
            raise InvalidRequestError(
                f"which model?\n  expected one of {', '.join(self._signatures)}, got {got}"
            )
        return model


def _take_back(submitted: asyncio.Future[PoolFuture | None]) -> None:
    future = None if submitted.cancelled() or submitted.exception() else submitted.result()
    if future is not None:
        future.cancel()


def _take(futures: deque[PoolFuture], *, ordered: bool) -> Answer:
    if ordered:
        return futures.popleft().result()
    done, _ = wait(futures, return_when=FIRST_COMPLETED)
    future = next(future for future in futures if future in done)
    futures.remove(future)
    return future.result()
