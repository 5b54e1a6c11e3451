"""What jobs call: `SessionPool`, every device of a node behind one `run`."""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ortprep.errors import (
    InvalidRequestError,
    PipelineError,
    PoolClosedError,
    PoolError,
)
from ortprep.runtime.loading.model_load_options import require_numbers
from ortprep.runtime.loading.session import keep_freed_memory
from ortprep.runtime.loading.variant_resolver import read_trusted_config
from ortprep.runtime.pool.config import Bundle, PoolConfig, name_bundles, plan_workers
from ortprep.runtime.pool.dispatch import Request
from ortprep.runtime.pool.lane import Answer, require_room
from ortprep.runtime.pool.report import PoolStats
from ortprep.runtime.pool.service import Service
from ortprep.runtime.pool.template import Template
from ortprep.runtime.pool.worker import Worker
from ortprep.runtime.tensors.signatures import check_inputs, read_signature

_STOP_GRACE_S = 10.0


class SessionPool:
    """Sessions of one or several bundles, in one process per device; all processes start at once.

    It may be used from many threads, as by `ThreadPoolExecutor.submit(pool.run, …)` and, in asyncio, by
    `asyncio.to_thread(pool.run, …)`. Large arrays travel in memory files. Answers are ordinary arrays.
    It needs Linux.

    Args:
        bundles: A bundle's folder or registry reference, as `load` takes it, or several by the names that
            requests use.
        config: The settings; None for the defaults.

    Raises:
        PipelineError: The bundles cannot be read, or fewer than `min_ready` workers became ready; then the
            first error of the ones that failed, as `load` would have raised it.
        PoolError: There are no such devices, or a model takes or gives other than numbers.
        WorkerDiedError: A worker died before it was ready.
    """

    def __init__(self, bundles: Bundle | Mapping[str, Bundle], config: PoolConfig | None = None) -> None:
        config = config or PoolConfig()
        paths = name_bundles(bundles, config.require_signature)
        configs = {name: read_trusted_config(path, config.require_signature) for name, path in paths.items()}
        self._signatures = {name: read_signature(name, one) for name, one in configs.items()}
        try:
            self._workers, self._templates, self.placement = plan_workers(paths, configs, config)
        except OSError as error:
            raise PoolError(f"cannot make a pool\n  {error}", hint="ulimit -n") from error
        min_ready = len(self._workers) if config.min_ready is None else config.min_ready
        if min_ready > len(self._workers):
            raise PoolError(f"bad min_ready\n  expected 0 to {len(self._workers)}, got {min_ready}")
        self._closed_by: PipelineError | None = None
        self._service = Service(self._signatures)
        keep_freed_memory()  # for the arrays of answers
        # The threads hold what it has and not this, so that a pool that is forgotten ends its workers.
        self._finalizer = weakref.finalize(self, _abandon, self._service, self._workers, self._templates)
        self._finalizer.atexit = False  # the kernel ends the workers with the program
        _POOLS.add(self)
        try:
            for worker in self._workers:
                worker.start(config, self._service.dispatcher, self._workers)
            self.wait_ready(min_ready)
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
            PoolError: `timeout_s` or `retries` is no number; or no worker is left for the model.
            RunError: ONNX Runtime refused the request.
            NoRoomError: The request or the answer is too large, or there is no memory for it.
            RequestTimeoutError: The deadline passed.
            WorkerDiedError: The worker died while it ran the request.
            PoolClosedError: The pool was closed.
        """
        request = self._request(inputs, model, timeout_s, retries)
        if threading.current_thread() is threading.main_thread():
            return self._service.answer_aside(request)  # since a signal's handler may raise here
        return self._service.answer(request)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._signatures)

    def wait_ready(self, count: int | None = None) -> None:
        """Waits until this many workers are ready; None for all.

        Raises:
            PipelineError: They never will be ready.
        """
        workers, count = self._workers, len(self._workers) if count is None else count
        if not 0 <= count <= len(workers):
            raise PoolError(f"bad number of workers\n  expected 0 to {len(workers)}, got {count}")
        changed = self._service.dispatcher.changed
        with changed:
            while sum(worker.state == "ready" for worker in workers) < count:
                failed = [worker for worker in workers if worker.state == "failed"]
                if len(workers) - len(failed) < count:
                    raise failed[0].error or PoolError("workers failed")
                if any(worker.state == "stopped" for worker in workers):
                    raise self._service.dispatcher.closed_error()
                changed.wait()

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing."""
        dispatcher = self._service.dispatcher
        with dispatcher.changed:
            workers = tuple([worker.stats() for worker in self._workers])
            is_degraded = any(worker.state == "failed" for worker in workers)
            return PoolStats(workers, dispatcher.pending, is_degraded)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accepts no more requests, and ends the workers.

        Args:
            drain: Whether accepted requests are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        error = PoolClosedError("pool is closed", hint="make a new one: SessionPool(…)")
        self._closed_by, dispatcher, grace_s = self._closed_by or error, self._service.dispatcher, 0.0
        if self._finalizer.alive:
            try:
                if drain:
                    dispatcher.close(error)
                    grace_s = _STOP_GRACE_S if dispatcher.wait_idle(timeout_s) else 0.0
            finally:  # also where a signal's handler raises
                self._finalizer.detach()
                dispatcher.fail(error)
                _stop(self._service, self._workers, self._templates, grace_s)
        _join(self._workers, self._templates)
        dispatcher.wait_idle(_STOP_GRACE_S)

    def __enter__(self) -> SessionPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _request(
        self, inputs: Mapping[str, Any], model: str | None, timeout_s: float | None, retries: int
    ) -> Request:
        """Returns a request for a model of the pool; None stands for its only one."""
        if self._closed_by is not None:
            raise copy.copy(self._closed_by)
        if sys.is_finalizing():  # its threads never run again
            raise PoolClosedError("a pool cannot be used while the interpreter ends")
        if model is None and len(self._signatures) == 1:
            model = next(iter(self._signatures))
        if model is None or model not in self._signatures:
            got = "none" if model is None else repr(model)
            raise InvalidRequestError(
                f"which model?\n  expected one of {', '.join(self._signatures)}, got {got}"
            )
        signature = self._signatures[model]
        arrays = check_inputs(signature, inputs)
        require_room(arrays)
        timeout_s = math.inf if timeout_s is None else timeout_s
        require_numbers(timeout_s=timeout_s, retries=retries)
        return Request(model, arrays, float(timeout_s), retries)

    def _forget(self) -> None:
        """Becomes a closed pool, in a process that was forked from the pool's."""
        self._closed_by = PoolClosedError("a pool cannot be used in a fork of its process")
        self._finalizer.detach()
        self._workers, self._templates = (), ()
        self._service.dispatcher.changed = threading.Condition()  # another thread may have had it


def _stop(
    service: Service, workers: Sequence[Worker], templates: Sequence[Template], grace_s: float = 0.0
) -> None:
    """Ends the workers, after `grace_s` seconds for what they are at, without waiting for that."""
    for worker in workers:
        worker.stop(grace_s)
    for template in templates:
        template.interrupt()
    service.stop()


def _join(workers: Sequence[Worker], templates: Sequence[Template]) -> None:
    """Waits until all workers have ended, and ends their templates, which reaped them."""
    for worker in workers:
        worker.join()
    for template in templates:
        template.stop()


def _abandon(service: Service, workers: Sequence[Worker], templates: Sequence[Template]) -> None:
    """Ends what a pool has that was forgotten."""
    _stop(service, workers, templates)
    threading.Thread(target=_join, args=(workers, templates), daemon=True).start()


_POOLS: weakref.WeakSet[SessionPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in tuple(_POOLS):
        pool._forget()
    _POOLS.clear()


os.register_at_fork(after_in_child=_forget_all)
