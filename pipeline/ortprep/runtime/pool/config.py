"""How a pool is set up: its settings, and the workers that follow from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.loader_config import LoaderConfig
from ortprep.errors import PoolError
from ortprep.runtime.loading.load_options import DigestPolicy
from ortprep.runtime.loading.model_load_options import ModelLoadOptions, require_counts, require_positive
from ortprep.runtime.loading.opened_bundle import find_threads
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_resolver import read_trusted_config
from ortprep.runtime.loading.variant_selection import FASTEST
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.placement import Placement, device_variables, place_bundles, resolve_devices
from ortprep.runtime.pool.process import ModelJob, WorkerJob
from ortprep.runtime.pool.report import WorkerStats
from ortprep.runtime.pool.template import Template
from ortprep.runtime.pool.worker import Worker

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import SessionOptions


Bundle = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The settings of a `SessionPool`.

    Attributes:
        devices: `all` (every GPU, or the CPU if there is none), or some of `cpu`, `cuda:0`, ….
        workers_per_device: Processes per device.
        target: Take only variants prepared for this target; None for what fits the device.
        precision: As `load` takes it.
        digests: As `load` takes it.
        require_signature: As `load` takes it, of every bundle.
        session_options: As `load` takes them, for every session; from an object, its attributes and the
            entries in the table of options. They also take precedence over `threads`.
        threads: Threads per worker; None divides the processors among them.
        min_ready: Return as soon as this many workers are ready; None for all of them. 0 waits for none.
        start_timeout_s: Seconds within which a worker must be ready.
        run_timeout_s: Seconds that one run may take; a worker that takes longer is killed and replaced.
        max_restarts: Restarts of a worker in a row, before it is given up; an answer, or 30 s of uptime,
            resets the count.
        worker: The function that workers run, `module:function`.

    Raises:
        PoolError: A setting is not allowed.
        LoadError: A setting that `load` takes is not allowed.
    """

    devices: str | Sequence[str] = "all"
    workers_per_device: int = 1
    target: str | None = None
    precision: str = FASTEST
    digests: DigestPolicy = "changed"
    require_signature: str | os.PathLike[str] | None = None
    session_options: SessionOptions | None = None
    threads: int | None = None
    min_ready: int | None = None
    start_timeout_s: float = 600.0
    run_timeout_s: float = 300.0
    max_restarts: int = 5
    worker: str = "ortprep.runtime.pool.worker_main:main"

    def __post_init__(self) -> None:
        require_counts(workers_per_device=self.workers_per_device)
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
            threads=threads if threads is not None else self.threads,
            may_spin=may_spin,
            session_options=_collect_options(self.session_options),
        )


def _collect_options(session_options: SessionOptions | None) -> dict[str, str | int | bool] | None:
    """Returns an application's session options as they are sent to a worker."""
    if session_options is None:
        return None
    from ortprep.runtime.loading.caller_options import read_options, split_options

    attributes, entries = split_options(read_options(session_options))
    return {**attributes, **entries}


def name_bundles(
    bundles: Bundle | Mapping[str, Bundle], signature: str | os.PathLike[str] | None
) -> dict[str, Path]:
    """Returns the folders of bundles by the names that requests use.

    Raises:
        PipelineError: There is none, or one cannot be found or is not signed as required.
    """
    if isinstance(bundles, Mapping):
        if not bundles:
            raise PoolError("no bundle for the pool\n  expected at least one")
        return {
            str(name): Path(os.path.realpath(locate(path, require_signature=signature)))
            for name, path in bundles.items()
        }
    path = Path(os.path.realpath(locate(bundles, require_signature=signature)))
    return {read_trusted_config(path, signature).name: path}


def plan_workers(
    paths: Mapping[str, Path], loader_configs: Mapping[str, LoaderConfig], config: PoolConfig
) -> tuple[tuple[Worker, ...], tuple[Template, ...], Placement]:
    """Returns the workers of a pool, what they are forked from, and which device serves what.

    Raises:
        PoolError: There are no such devices, or they have no room for the models.
        OSError: No more files can be opened.
    """
    count, devices = config.workers_per_device, resolve_devices(config.devices, read_hardware())
    _, placement = place_bundles(paths, devices, copies=count, precision=config.precision)
    models = {
        name: ModelJob(number, name, str(paths[name]), loader_config)
        for number, (name, loader_config) in enumerate(loader_configs.items())
    }
    threads, total = config.threads, len(devices) * count
    if threads is None and total > 1:
        threads = find_threads(total)
    load = config.load_options(threads=threads, may_spin=total == 1)
    workers: list[Worker] = []
    templates: dict[tuple[str, ...], Template] = {}
    for device, assignment in zip(devices, placement.assignments, strict=True):
        variables = device_variables(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        job = WorkerJob(
            entry=config.worker,
            path=tuple(str(entry) or str(Path.cwd()) for entry in sys.path),
            models=tuple(models[name] for name in assignment.models),
            device_id=None if device.kind == "cpu" else 0,  # a worker sees its own GPU alone
            load=load,
        )
        if _can_be_forked(job) and assignment.models not in templates:
            template_job = replace(job, is_template=True)
            environment, name = {**variables, "OPENBLAS_NUM_THREADS": "1"}, f"template/{len(templates)}"
            templates[assignment.models] = Template(template_job, environment, name, config.start_timeout_s)
        for number in range(count if assignment.models else 0):
            stats = WorkerStats(len(workers), f"{device.name}/{number}", device.name, assignment.models)
            template = templates[assignment.models] if _can_be_forked(job) else None
            workers.append(Worker(job, variables, stats, template))
    return tuple(workers), tuple(templates.values()), placement


def _can_be_forked(job: WorkerJob) -> bool:
    """Returns whether a worker can be forked: on a CPU, on one thread, with the bundle's options.

    An application's own session options may ask for threads, or for files that each process writes.
    """
    return job.device_id is None and job.load.threads == 1 and not job.load.session_options
