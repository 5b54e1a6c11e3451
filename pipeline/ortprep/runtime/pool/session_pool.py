"""What jobs call: `SessionPool`, every device of a node behind one `run`."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.loading.model_load_options import require_counts
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.machine.process_memory import free_bytes
from ortprep.runtime.placement.assignment import Placement
from ortprep.runtime.placement.devices import Device, resolve_devices
from ortprep.runtime.placement.environment import plan_environments, read_numa_nodes
from ortprep.runtime.placement.model_load import place_bundles
from ortprep.runtime.pool.base_pool import BasePool
from ortprep.runtime.pool.broker import RequestBroker
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.messages import INLINE_BYTES
from ortprep.runtime.pool.pool_memory import PoolMemory
from ortprep.runtime.pool.process import ModelJob, WorkerJob
from ortprep.runtime.pool.stats import PoolStats, WorkerStats
from ortprep.runtime.pool.supervisor import Supervisor
from ortprep.runtime.pool.worker_state import WorkerState
from ortprep.runtime.tensors.signatures import read_signature

Bundle = str | os.PathLike[str]

_SHARE_OF_MEMORY = 0.5
_STOP_GRACE_S = 10.0


class SessionPool(BasePool):
    """Sessions of one or several bundles, in one process per device; all processes start at once.

    It may be used from many threads. Large arrays travel through shared memory; arrays from `empty`, and
    answers that are passed on to another model, are not copied at all. It needs Linux.

    Answers are views of shared memory, which stays allocated until the last of them is gone. Answers under
    16 KiB, and those requested with `copy=True`, are ordinary arrays.

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
        paths = _name_bundles(bundles, config.require_signature)
        configs = {name: read_loader_config(path) for name, path in paths.items()}
        signatures = {name: read_signature(name, loader_config) for name, loader_config in configs.items()}
        devices = resolve_devices(config.devices, read_hardware())
        _, self.placement = place_bundles(
            paths,
            devices,
            copies=config.workers_per_device,
            precision=config.precision,
            buckets=config.buckets,
        )
        models = {
            name: ModelJob(number, name, str(paths[name]), loader_config)
            for number, (name, loader_config) in enumerate(configs.items())
        }
        workers = _make_workers(devices, config, self.placement, models)
        min_ready = len(workers) if config.min_ready is None else config.min_ready
        if min_ready > len(workers):
            raise PoolError(f"bad min_ready\n  expected 0 to {len(workers)}, got {min_ready}")
        shared_bytes = config.max_shared_bytes or max(2**20, int(free_bytes() * _SHARE_OF_MEMORY))
        memory = PoolMemory(len(workers), shared_bytes)
        try:
            self._broker = RequestBroker(signatures, memory, config.max_pending)
            self._supervisor = Supervisor(workers, config, self._broker)
        except OSError as error:
            memory.close()
            raise PoolError(f"cannot make a pool\n  {error}", hint="ulimit -n") from error
        super().__init__(signatures, self._broker)
        # The thread holds the supervisor and not this, so that a pool that is forgotten ends its workers.
        self._finalizer = weakref.finalize(self, self._broker.wakeup.stop_soon)
        self._finalizer.atexit = False  # the supervisors' own, which waits
        self._supervisor.start()
        try:
            self._supervisor.wait_ready(min_ready)
        except BaseException:  # an interrupt, too, must leave no worker
            self.close(drain=False)
            raise

    def _count_workers(self, model: str | None = None) -> int:
        return sum(model is None or model in member.models for member in self._supervisor.workers)

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        array = np.asarray(value)
        is_small = array.nbytes < INLINE_BYTES
        if (
            is_small
            or array.dtype != self._signatures[model].inputs[name]
            or self._broker.memory.find(array) is not None
        ):
            return array
        shared = self.empty(name, array.shape, model=model, timeout_s=timeout_s)
        shared[...] = array
        with self._broker.changed:
            self._broker.copied_in_bytes += array.nbytes
        return shared

    def check(self, timeout_s: float | None = None) -> dict[str, str]:
        """Makes every ready worker run its golden samples again; a worker with a wrong answer is replaced.

        Args:
            timeout_s: Seconds to wait; None as long as it takes.

        Returns:
            What was wrong, by worker's name; empty if nothing was.

        Raises:
            RequestTimeoutError: Some workers had not answered by then.
        """
        self._broker.admission.refuse_in_callback("check()")
        checks = self._supervisor.manager.begin_check()
        if wait(checks.values(), timeout_s).not_done:
            raise RequestTimeoutError(f"check took too long\n  expected an end within {timeout_s:g} s")
        return {name: wrong for name, check in checks.items() if (wrong := check.result()) is not None}

    def wait_ready(self, count: int | None = None) -> None:
        """Waits until this many workers are ready; None for all.

        Raises:
            PipelineError: They never will be ready.
        """
        require_counts(minimum=0, count=count)
        self._supervisor.wait_ready(len(self._supervisor.workers) if count is None else count)

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing."""
        return self._supervisor.stats()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accepts no more requests, ends the workers, and removes the shared memory.

        Answers that are still held stay readable.

        Args:
            drain: Whether accepted requests are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        if drain:
            self._broker.admission.refuse_in_callback("close()")
        self._broker.admission.close(PoolClosedError("pool is closed", hint="make a new one: SessionPool(…)"))
        grace_s = 0.0
        try:
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


def _name_bundles(
    bundles: Bundle | Mapping[str, Bundle], signature: str | os.PathLike[str] | None
) -> dict[str, Path]:
    if isinstance(bundles, Mapping):
        if not bundles:
            raise PoolError("no bundle for the pool\n  expected at least one")
        return {
            str(name): Path(os.path.realpath(locate(path, require_signature=signature)))
            for name, path in bundles.items()
        }
    path = Path(os.path.realpath(locate(bundles, require_signature=signature)))
    return {read_loader_config(path).name: path}


def _make_workers(
    devices: Sequence[Device], config: PoolConfig, placement: Placement, models: Mapping[str, ModelJob]
) -> list[WorkerState]:
    count = config.workers_per_device
    environments = plan_environments(
        devices,
        workers_per_device=count,
        processors=sorted(os.sched_getaffinity(0)),
        nodes=read_numa_nodes(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        threads=config.threads,
    )
    workers: list[WorkerState] = []
    for index, environment in enumerate(environments):
        names = placement.assignments[index // count].models
        if names:
            device = environment.device.name
            figures = WorkerStats(len(workers), f"{device}/{index % count}", device, names)
            job = WorkerJob(
                entry=config.worker,
                path=tuple(str(entry) or str(Path.cwd()) for entry in sys.path),
                models=tuple(models[name] for name in names),
                device_id=environment.device_id,
                processors=environment.processors,
                load=config.load_options(threads=environment.threads, may_spin=environment.may_spin),
            )
            workers.append(WorkerState(environment.variables, job, figures))
    return workers
