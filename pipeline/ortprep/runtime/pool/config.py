"""How a pool is set up."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortprep.runtime.loading.load_options import DigestPolicy
from ortprep.runtime.loading.model_load_options import ModelLoadOptions, require_counts, require_positive
from ortprep.runtime.loading.variant_selection import FASTEST
from ortprep.runtime.pool.stats import WorkerEvent

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import SessionOptions


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The settings of a `SessionPool`.

    Attributes:
        devices: `all` (every GPU, or the CPU if there is none), or some of `cpu`, `cuda:0`, ….
        workers_per_device: Processes per device.
        target: Take only variants prepared for this target; None for what fits the device.
        precision: As `load` takes it.
        buckets: Whether workers also load the shape buckets, which then run the batches of their sizes. All
            are loaded before a worker is ready, and each needs extra memory.
        digests: As `load` takes it.
        require_signature: As `load` takes it, of every bundle.
        session_options: As `load` takes them, for every session; from an object, its attributes and the
            entries in the table of options. They also take precedence over `threads`.
        threads: Threads per worker; None divides the processors among them.
        min_ready: Return as soon as this many workers are ready; None for all of them. 0 waits for none.
        start_timeout_s: Seconds within which a worker must be ready.
        run_timeout_s: Seconds that one run may take; a worker that takes longer is killed and replaced.
        max_pending: Maximum number of unanswered requests; further calls block.
        max_shared_bytes: Maximum shared memory of requests and answers in use; None for half of what this
            machine and the control group of this process have free.
        max_restarts: Restarts of a worker in a row, before it is given up; an answer, or 30 s of uptime,
            resets the count.
        observer: Called with every `WorkerEvent`, on a thread of the pool.
        worker: The function that workers run, `module:function`.

    Raises:
        PoolError: A setting is not allowed.
        LoadError: A setting that `load` takes is not allowed.
    """

    devices: str | Sequence[str] = "all"
    workers_per_device: int = 1
    target: str | None = None
    precision: str = FASTEST
    buckets: bool = True
    digests: DigestPolicy = "changed"
    require_signature: str | os.PathLike[str] | None = None
    session_options: SessionOptions | None = None
    threads: int | None = None
    min_ready: int | None = None
    start_timeout_s: float = 600.0
    run_timeout_s: float = 300.0
    max_pending: int = 1024
    max_shared_bytes: int | None = None
    max_restarts: int = 5
    observer: Callable[[WorkerEvent], None] | None = None
    worker: str = "ortprep.runtime.pool.worker:main"

    def __post_init__(self) -> None:
        require_counts(
            workers_per_device=self.workers_per_device,
            max_pending=self.max_pending,
            max_shared_bytes=self.max_shared_bytes,
        )
        require_counts(minimum=0, min_ready=self.min_ready, max_restarts=self.max_restarts)
        require_positive(start_timeout_s=self.start_timeout_s, run_timeout_s=self.run_timeout_s)
        self.load_options()

    def load_options(self, *, threads: int | None = None, may_spin: bool = False) -> ModelLoadOptions:
        """Returns how workers open their bundles.

        Args:
            threads: Most threads of a session; None for what the bundle records.
            may_spin: Whether idle threads may spin.
        """
        return ModelLoadOptions(
            target=self.target,
            precision=self.precision,
            digests=self.digests,
            require_signature=None if self.require_signature is None else os.fspath(self.require_signature),
            buckets=self.buckets,
            threads=threads if threads is not None else self.threads,
            may_spin=may_spin,
            session_options=_collect_options(self.session_options),
        )


def _collect_options(session_options: SessionOptions | None) -> dict[str, str | int | bool] | None:
    """Returns an application's session options as they are sent to a worker."""
    if session_options is None:
        return None
    from ortprep.runtime.loading.caller_options import split_options

    attributes, entries = split_options(session_options)
    return {**attributes, **entries}
