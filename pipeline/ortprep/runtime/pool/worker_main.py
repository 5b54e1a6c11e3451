"""What runs in a worker: it makes its sessions, then answers one request after the other.

Whatever goes wrong with a request is its answer; whatever goes wrong with the worker ends the process, and
the pool replaces it.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.codec import encode as encode_record
from ortprep.errors import PipelineError, to_dict
from ortprep.runtime.ipc import MAX_PACKET_BYTES, MemoryFile
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.runtime.pool.messages import (
    MessageKind,
    ReadyReport,
    decode_head,
    encode,
    encode_head,
)
from ortprep.runtime.pool.worker_process import die_with
from ortprep.telemetry import has_telemetry_thread

if TYPE_CHECKING:
    from ortprep.runtime.pool.served_model import ServedModel
    from ortprep.runtime.pool.worker_process import WorkerJob

_SPIN_S = 0.0002
_MAX_REFUSALS = 16


class PoolConnection:
    """The worker's end of its socket.

    Args:
        may_spin: Whether to look for the next packet for a moment before sleeping, where nobody else needs
            the core: waking up, and running on cold caches, takes longer than most small requests.
    """

    def __init__(self, descriptor: int, *, may_spin: bool = False) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._spin_s = _SPIN_S if may_spin else 0.0
        self._buffer = memoryview(
            mmap.mmap(-1, MAX_PACKET_BYTES)
        )  # aligned, for tensors that are read in place
        self.send, self.close = self._socket.send, self._socket.close

    def receive(self) -> memoryview:
        """Returns the next packet, valid until the next call; empty once the pool has closed the socket."""
        until = time.perf_counter() + self._spin_s if self._spin_s else 0.0
        while until:
            try:
                return self._buffer[: self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                if time.perf_counter() >= until:
                    break
        return self._buffer[: self._socket.recv_into(self._buffer)]

    def receive_descriptors(self) -> tuple[bytes, list[int]]:
        """Returns the next packet, and the descriptors that came with it."""
        packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 3)
        return packet, descriptors


def main(job: WorkerJob) -> None:
    """Begins: makes the sessions a job names, and serves them until the pool ends it."""
    connection = PoolConnection(job.descriptors[0], may_spin=job.load.may_spin)
    try:
        models, threads = _open_models(job)
        from ortprep.runtime.machine.memory import private_bytes, written_bytes

        memory = MemoryFile(job.memory_bytes, job.descriptors[3])
    except PipelineError as error:
        connection.send(encode(MessageKind.BROKEN, 0, to_dict(error)))
        return
    ready = ReadyReport(
        variants={model.name: model.variant for model in models.values()},
        buckets={model.name: model.buckets for model in models.values()},
        private_bytes=private_bytes(),
    )
    if job.is_template:
        ready = replace(ready, unfit=_find_unfit(models, threads))
    connection.send(encode(MessageKind.READY, 0, encode_record(ready)))
    if job.is_template:
        connection = fork_workers(connection, job)  # comes back in each worker
        ready = replace(ready, private_bytes=written_bytes())
        connection.send(encode(MessageKind.READY, 0, encode_record(ready)))
    serve(connection, models, memory)


def _find_unfit(models: dict[int, ServedModel], threads: int) -> str:
    """Returns why a process with these models cannot be forked, given its threads before; empty if it can."""
    if has_telemetry_thread():
        return "usage data to be sent"
    if added := _count_threads() - threads:
        return f"{added} threads of ONNX Runtime"
    return next((why for model in models.values() if (why := model.find_unfit())), "")


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def fork_workers(connection: PoolConnection, job: WorkerJob) -> PoolConnection:
    """Forks a worker each time that the pool asks for one; returns in the workers, each with its socket.

    The template does nothing else, so whenever it forks, no run and no other thread is under way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the first collection in a worker would write to all of these objects
    while True:
        packet, descriptors = connection.receive_descriptors()
        if not packet:
            raise SystemExit  # the pool is gone, or wants it no more
        head = decode_head(memoryview(packet), "the pool")
        if head.kind is MessageKind.REAP:
            _, status = os.waitpid(head.number, 0)
            connection.send(encode_head(MessageKind.REAPED, head.number, figure=status))
            continue
        try:
            pid = os.fork()
        except OSError as error:
            connection.send(encode_head(MessageKind.FORKED, figure=error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                connection.close()
                return _become_worker(job, descriptors)
            connection.send(encode_head(MessageKind.FORKED, pid))
        for descriptor in descriptors:
            os.close(descriptor)


def _become_worker(job: WorkerJob, descriptors: Sequence[int]) -> PoolConnection:
    """Makes a fork a worker of its own; nothing of the template's that leads to the pool stays open."""
    own, death_pipe, output = descriptors
    die_with(death_pipe)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    for descriptor in (output, *job.descriptors[1:3]):
        os.close(descriptor)
    return PoolConnection(own, may_spin=job.load.may_spin)


def _open_models(job: WorkerJob) -> tuple[dict[int, ServedModel], int]:
    """Returns the models of a job, and how many threads there were before."""
    import_onnxruntime()
    # Only then: what imports numpy while ONNX Runtime is imported may find half of it.
    from ortprep.runtime.pool.served_model import open_served

    threads = _count_threads()
    return {model.number: open_served(model, job) for model in job.models}, threads


def serve(connection: PoolConnection, models: dict[int, ServedModel], memory: MemoryFile) -> None:
    """Answers messages until there are no more.

    Raises `LoadError`, which ends the process, if a model that has refused many requests in a row no longer
    answers its golden sample as recorded.
    """
    previous, refusals = None, 0
    while packet := connection.receive():
        head = decode_head(packet, "the pool")
        if (head.kind, head.number) == previous:
            continue  # a signal broke off who sent it, and it was sent again
        previous = head.kind, head.number
        if head.kind is MessageKind.RUN:
            model = models[head.model]
            try:
                answer, refusals = model.answer(head, packet, memory), 0
            except (PipelineError, MemoryError) as error:
                answer, refusals = encode(MessageKind.FAILED, head.number, to_dict(error)), refusals + 1
            connection.send(answer)
            if refusals and refusals % _MAX_REFUSALS == 0:
                model.check()
        elif head.kind is MessageKind.STOP:
            return
