"""What jobs call: `SessionPool`, every device of a node behind one `run`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.bundle.codec import encode
from pipeline.bundle.loader_config import read_loader_config
from pipeline.errors import PoolClosedError, PoolError, RequestTimeoutError
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading.bundle_loader import DigestPolicy, check_choice
from pipeline.runtime.loading.sources import locate
from pipeline.runtime.loading.variant_selection import FASTEST, PRECISIONS
from pipeline.runtime.pool.arena import Arena, Segment
from pipeline.runtime.pool.calls import PoolCalls
from pipeline.runtime.pool.crew import Member, PoolStats, WorkerEvent
from pipeline.runtime.pool.devices import Device, resolve_devices
from pipeline.runtime.pool.exchange import Exchange, Wires
from pipeline.runtime.pool.loads import place_bundles
from pipeline.runtime.pool.numbers import require_counts, require_positive
from pipeline.runtime.pool.placement import Placement
from pipeline.runtime.pool.process import StartMethod
from pipeline.runtime.pool.requests import IN_PLACE_BYTES, read_signature
from pipeline.runtime.pool.segments import OwnSegment, segment_name, segment_prefix, sweep_segments
from pipeline.runtime.pool.supervisor import Rules, Supervisor
from pipeline.runtime.pool.workplaces import plan_workplaces, read_numa_nodes

if TYPE_CHECKING:
    from pipeline.runtime.loading.bundle_loader import SessionOptions

Bundle = str | os.PathLike[str]

_WORKER = "pipeline.runtime.pool.worker:main"
_SHARE_OF_SHM = 0.5
_GRACE_S = 10.0


class SessionPool(PoolCalls):
    """Sessions of one or several bundles, in a process per device that are all made ready at once.

    It may be used from many threads. Arrays go through shared memory: those from `empty`, and answers handed
    on, are not copied at all. It needs Linux.

    Answers are arrays over shared memory, which is theirs as long as one of them lives; those under 16 KiB
    and those asked for with `copy=True` are ordinary arrays.

    Args:
        bundles: A bundle's folder or its place in a registry, as `load` takes it, or several by the name that
            requests call them by.
        devices: `all` (every GPU, or the CPU where there is none), or some of `cpu`, `cuda:0`, ….
        workers_per_device: Processes on each.
        target: Take only variants prepared for this target; None for what fits the device.
        min_ready: Return as soon as so many workers are ready; None for all of them. 0 waits for none.
        start_timeout_s: Seconds within which a worker must be ready.
        run_timeout_s: Seconds that one run may take; a worker that takes longer is ended and replaced.
        max_pending: Requests that may be unanswered at a time; who brings another waits.
        max_shared_bytes: Most shared memory to use; None for half of what is free.
        max_restarts: How often a worker is started again in a row, without an answer or half a minute of
            peace between its deaths, until it is given up.
        threads: Threads per worker; None divides the processors among them.
        digests: As `load` takes it.
        precision: As `load` takes it.
        buckets: Whether workers also load the variants for batches of certain sizes, which then take those
            batches. All are loaded before a worker is ready, and each needs memory of its own.
        require_signature: As `load` takes it, of every bundle.
        session_options: As `load` takes them, of every session; of an object, its attributes and the entries
            that the table of options knows. They also win over the share of a worker (`threads`).
        start_method: How processes are made.
        observer: Called with everything that happens to workers, on a thread of the pool.
        worker: The function that workers run, `module:function`.

    Raises:
        PipelineError: The bundles cannot be read, or fewer than `min_ready` workers became ready; then what
            the first of the others said, as `load` would have raised it.
        PoolError: The arguments contradict each other, or a model cannot be served through shared memory.
        WorkerDiedError: A worker died before it was ready.
    """

    def __init__(
        self,
        bundles: Bundle | Mapping[str, Bundle],
        *,
        devices: str | Sequence[str] = "all",
        workers_per_device: int = 1,
        target: str | None = None,
        min_ready: int | None = None,
        start_timeout_s: float = 600.0,
        run_timeout_s: float = 300.0,
        max_pending: int = 1024,
        max_shared_bytes: int | None = None,
        max_restarts: int = 5,
        threads: int | None = None,
        digests: DigestPolicy = "changed",
        precision: str = FASTEST,
        buckets: bool = True,
        require_signature: str | os.PathLike[str] | None = None,
        session_options: SessionOptions | None = None,
        start_method: StartMethod = "spawn",
        observer: Callable[[WorkerEvent], None] | None = None,
        worker: str = _WORKER,
    ) -> None:
        self._paths = _name_bundles(bundles, require_signature)
        configs = {name: read_loader_config(path) for name, path in self._paths.items()}
        self._signatures = {name: read_signature(name, config) for name, config in configs.items()}
        places = resolve_devices(devices, read_hardware())
        require_counts(
            workers_per_device=workers_per_device,
            max_pending=max_pending,
            max_shared_bytes=max_shared_bytes,
            threads=threads,
        )
        require_counts(least=0, min_ready=min_ready, max_restarts=max_restarts)
        require_positive(start_timeout_s=start_timeout_s, run_timeout_s=run_timeout_s)
        check_choice("precision", precision, (FASTEST, *PRECISIONS))
        _, self.placement = place_bundles(
            self._paths, places, copies=workers_per_device, precision=precision, buckets=buckets
        )
        members = _make_members(places, workers_per_device, threads, max_restarts, self.placement)
        wanted = len(members) if min_ready is None else min_ready
        if not 0 <= wanted <= len(members):
            raise PoolError(f"bad min_ready\n  expected 0 to {len(members)}, got {min_ready}")
        check_choice("start_method", start_method, ("spawn", "forkserver"))
        check_choice("digests", digests, ("changed", "full", "off"))
        sweep_segments()
        prefix = segment_prefix()

        def create(number: int, size: int) -> Segment:
            return OwnSegment(segment_name(prefix, number), size)

        def make_exchange(wires: Wires) -> Exchange:
            arena = Arena(create, _default_shared_bytes() if max_shared_bytes is None else max_shared_bytes)
            return Exchange(self._signatures, arena, wires, max_pending)

        rules = Rules(
            job={
                "entry": worker,
                "prefix": prefix,
                "digests": digests,
                "session_options": None if session_options is None else _collect_options(session_options),
            },
            models={
                name: {
                    "name": name,
                    "bundle": str(self._paths[name]),
                    "target": target,
                    "precision": precision,
                    "buckets": buckets,
                    "config": encode(config),
                }
                for name, config in configs.items()
            },
            start_timeout_s=start_timeout_s,
            run_timeout_s=run_timeout_s,
            method=start_method,
            observer=observer,
        )
        self._supervisor = Supervisor(members, rules, make_exchange)
        self._exchange = self._supervisor.exchange
        super().__init__(self._signatures, self._exchange)
        # The thread holds the supervisor and not this, so that a pool that is forgotten ends its workers.
        self._finalizer = weakref.finalize(self, self._supervisor.stop_soon)
        self._finalizer.atexit = False  # the supervisors' own, which waits
        self._supervisor.start()
        try:
            self._supervisor.wait_ready(wanted)
        except BaseException:
            self.close(drain=False)
            raise

    def _count_workers(self, model: str | None = None) -> int:
        return sum(model is None or model in member.models for member in self._supervisor.members)

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        array = np.asarray(value)
        if array.dtype != self._signatures[model].inputs[name] or array.nbytes < IN_PLACE_BYTES:
            return array
        with self._exchange.changed:
            if self._exchange.arena.find(array.__array_interface__["data"][0], array.nbytes) is not None:
                return array
        place = self.empty(name, array.shape, model=model, timeout_s=timeout_s)
        place[...] = array
        with self._exchange.changed:
            self._exchange.copied.in_bytes += array.nbytes
        return place

    def check(self, timeout_s: float | None = None) -> dict[str, str]:
        """Has every ready worker run its golden samples again; one that answers wrongly is replaced.

        Args:
            timeout_s: Seconds to wait; None as long as it takes.

        Returns:
            What was wrong, by worker's name; empty if nothing was.

        Raises:
            RequestTimeoutError: Some had not said by then.
        """
        self._exchange.gate.refuse_in_callback("check()")
        check = self._supervisor.begin_check()
        if not check.done.wait(timeout_s):
            raise RequestTimeoutError(f"check took too long\n  expected an end within {timeout_s:g} s")
        return {self._supervisor.members[number].name: text for number, text in check.wrong.items()}

    def wait_ready(self, count: int | None = None) -> None:
        """Waits until so many workers are ready; None for all.

        Raises:
            PipelineError: They never will be.
        """
        require_counts(least=0, count=count)
        self._supervisor.wait_ready(len(self._supervisor.members) if count is None else count)

    def stats(self) -> PoolStats:
        """Returns what the pool and its workers are doing."""
        return self._supervisor.stats()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Takes no more requests, and ends the workers and removes the shared memory.

        Answers that are still held stay readable.

        Args:
            drain: Whether requests that were taken are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        if drain:
            self._exchange.gate.refuse_in_callback("close()")
        self._exchange.gate.close(PoolClosedError("pool is closed", hint="make a new one: SessionPool(…)"))
        try:
            is_idle = drain and self._exchange.wait_idle(timeout_s)
        except BaseException:
            self._supervisor.stop_soon()
            raise
        self._supervisor.stop(grace_s=_GRACE_S if is_idle else 0.0)
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


def _collect_options(session_options: SessionOptions) -> dict[str, str | int | bool]:
    """Returns an application's session options as a worker is told them."""
    from pipeline.runtime.loading.caller_options import split_options

    attributes, entries = split_options(session_options)
    return {**attributes, **entries}


def _make_members(
    devices: Sequence[Device],
    workers_per_device: int,
    threads: int | None,
    max_restarts: int,
    placement: Placement,
) -> list[Member]:
    workplaces = plan_workplaces(
        devices,
        workers_per_device=workers_per_device,
        processors=sorted(os.sched_getaffinity(0)),
        nodes=read_numa_nodes(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        threads=threads,
    )
    used = [
        (f"{place.device.name}/{index % workers_per_device}", place, models)
        for index, place in enumerate(workplaces)
        if (models := placement.models_on(index // workers_per_device))
    ]
    return [
        Member(number, name, place, models, max_restarts) for number, (name, place, models) in enumerate(used)
    ]


def _default_shared_bytes() -> int:
    room = os.statvfs("/dev/shm")
    return max(2**20, int(room.f_bavail * room.f_frsize * _SHARE_OF_SHM))
