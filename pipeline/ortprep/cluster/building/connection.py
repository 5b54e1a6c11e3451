"""A driver's connection to Ray: its nodes, and the submission of jobs."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ortprep
from ortprep.bundle.codec import decode, encode
from ortprep.cluster.building.fleet_plan import ClusterNode, Reservation, parse_nodes
from ortprep.cluster.building.job import BuildJob, JobResult, run_job
from ortprep.errors import BundleError, ClusterError, SpecError

_CONNECT_S = 10.0
_HINT = "ray start --head   # and --address HOST:6379"

ObjectRef = Any
"""Ray's reference to the result of a job."""


@dataclass(frozen=True)
class Connection:
    """Ray, as a build sees it; `on_gpu` runs each job in a process of its own."""

    ray: Any
    on_cpu: Any
    on_gpu: Any

    def list_nodes(self) -> tuple[ClusterNode, ...]:
        """Returns the nodes that are alive."""
        return parse_nodes(self.ray.nodes())

    def reserve(self, kind: str, reservation: Reservation) -> Callable[..., Any]:
        """Returns a function from a job's name to Ray's remote function, which holds a device for the job.

        Raises:
            SpecError: Ray refuses such resources or labels.
        """
        place = functools.partial(
            (self.on_gpu if reservation.gpus else self.on_cpu).options,
            num_cpus=reservation.cpus,
            num_gpus=reservation.gpus,
            resources=dict(reservation.resources),
            label_selector=dict(reservation.labels),
        )
        try:
            place()
        except (ValueError, TypeError) as error:
            raise SpecError(
                f"Ray refuses the resources of kind {kind} of the fleet\n  {str(error).splitlines()[0]}"
            ) from error
        return place

    def submit(self, job: BuildJob, place: Callable[..., Any]) -> ObjectRef:
        """Has Ray run a job at a place of `reserve`, once there is room on a node that fits."""
        level = logging.getLogger("ortprep").getEffectiveLevel()
        return place(name=job.name).remote(json.dumps(encode(job)), ortprep.__version__, level)

    def wait(self, refs: Sequence[ObjectRef], timeout_s: float) -> list[ObjectRef]:
        """Returns those that are done, after some seconds at the latest."""
        done, _ = self.ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        return list(done)

    def collect(self, ref: ObjectRef) -> JobResult:
        """Returns what came of a job that is done."""
        try:
            return decode(JobResult, json.loads(self.ray.get(ref)))
        except (self.ray.exceptions.RayError, BundleError) as error:
            raise ClusterError(
                _describe(error), hint="run it again: finished models are not built again"
            ) from error

    def cancel(self, refs: Sequence[ObjectRef]) -> None:
        """Ends jobs that are not done."""
        for ref in refs:
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(ref, force=True)


@contextmanager
def connect(address: str | None) -> Iterator[Connection]:
    """Yields a connection to a cluster; one that stood before is used and left standing.

    Args:
        address: `HOST:PORT`, or another address of `ray.init` that names a cluster; None for `$RAY_ADDRESS`.

    Raises:
        ClusterError: No cluster is named, or it cannot be reached, or stops answering.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # it takes lines of different tasks for the same
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        address = address or os.environ.get("RAY_ADDRESS", "")
        _check_reachable(address)
        try:
            # Every worker gets the folder that this process is in as the first where it looks for modules.
            with chdir("/"):
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(
                f"cannot reach a Ray cluster: {address}\n  {str(error).splitlines()[0]}", hint=_HINT
            ) from error
    try:
        # The driver starts jobs again: Ray itself counts no death for want of memory.
        on_cpu = ray.remote(max_retries=0)(run_job)
        # CUDA_VISIBLE_DEVICES is another's next time, and CUDA has looked at it once.
        on_gpu = ray.remote(max_retries=0, max_calls=1)(run_job)
        try:
            yield Connection(ray, on_cpu, on_gpu)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"the cluster stopped answering: {_describe(error)}",
                hint="ray status   # then run it again: finished models are not built again",
            ) from error
    finally:
        if is_ours:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises if no cluster is named or none is there, in seconds, for which Ray takes minutes.

    For `auto` and for none, Ray takes an address from a file that every user of the machine can write
    (`/tmp/ray/ray_current_cluster`), and this process unpickles what the cluster there answers.
    """
    if ":" not in address:
        raise ClusterError(
            f"no Ray cluster is named: {address!r}\n  expected HOST:PORT in --address or RAY_ADDRESS",
            hint=_HINT,
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"cannot reach a Ray cluster: {address}\n  {error.strerror or error}",
            hint=_HINT,
        ) from error


def _describe(error: Exception) -> str:
    """Returns what went wrong as the first line of what Ray says, without the colours of a terminal."""
    cause = getattr(error, "cause", None) or error
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(cause)).strip().splitlines()
    return f"{type(cause).__name__}\n  {lines[0] if lines else 'no message'}"
