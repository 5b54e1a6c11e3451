"""What runs in a worker: it makes its sessions, then answers one request after the other.

Whatever goes wrong with a request is its answer; whatever goes wrong with the worker ends the process, and
the pool replaces it.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import encode as encode_record
from ortprep.errors import PipelineError, to_dict
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.runtime.pool.messages import (
    MAX_PACKET_BYTES,
    Head,
    MessageKind,
    ReadyReport,
    decode_head,
    encode,
)

if TYPE_CHECKING:
    from ortprep.runtime.pool.process import WorkerJob
    from ortprep.runtime.pool.served_model import ServedModel, SlotMemory

_SPIN_S = 0.0002


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


def main(job: WorkerJob) -> None:
    """Begins: makes the sessions a job names, and serves them until the pool ends it."""
    connection = PoolConnection(job.descriptors[0], may_spin=job.load.may_spin)
    if job.processors:
        with suppress(OSError):  # they may have been taken away since; anywhere is better than nowhere
            os.sched_setaffinity(0, job.processors)
    try:
        models, phases_s = _open_models(job)
        from ortprep.runtime.machine.process_memory import private_bytes
        from ortprep.runtime.pool.served_model import SlotMemory

        memory = SlotMemory(job.descriptors[3], job.memory_bytes)
    except PipelineError as error:
        connection.send(encode(MessageKind.BROKEN, 0, to_dict(error)))
        return
    ready = ReadyReport(
        variants={model.name: model.variant for model in models.values()},
        buckets={model.name: model.buckets for model in models.values()},
        phases_s=phases_s,
        private_bytes=private_bytes(),
    )
    connection.send(encode(MessageKind.READY, 0, encode_record(ready)))
    serve(connection, models, memory)


def _open_models(job: WorkerJob) -> tuple[dict[int, ServedModel], dict[str, float]]:
    """Returns the models of a job, and what took how long, in seconds."""
    times = [time.perf_counter()]
    import_onnxruntime()
    # Only then: what imports numpy while ONNX Runtime is imported may find half of it.
    from ortprep.runtime.pool.served_model import open_served

    models = {}
    for model in job.models:
        times.append(time.perf_counter())
        models[model.number] = open_served(model, job)
    times.append(time.perf_counter())
    names = ("import", *(model.name for model in job.models))
    return models, {name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)}


def serve(connection: PoolConnection, models: dict[int, ServedModel], memory: SlotMemory) -> None:
    """Answers messages until there are no more."""
    previous = None
    while packet := connection.receive():
        head = decode_head(packet, "the pool")
        if (head.kind, head.number) == previous:
            continue  # a signal broke off who sent it, and it was sent again
        previous = head.kind, head.number
        if head.kind is MessageKind.RUN:
            connection.send(_run(head, packet, models[head.model], memory))
        elif head.kind is MessageKind.GROW:
            if (answer := memory.grown(head)) is not None:
                connection.send(answer)
        elif head.kind is MessageKind.CHECK:
            connection.send(encode(MessageKind.CHECKED, head.number, _check(models)))
        elif head.kind is MessageKind.STOP:
            return


def _run(head: Head, packet: memoryview, model: ServedModel, memory: SlotMemory) -> bytes:
    try:
        return model.run(head, packet, memory)
    except (PipelineError, MemoryError) as error:
        return encode(MessageKind.FAILED, head.number, to_dict(error))


def _check(models: dict[int, ServedModel]) -> dict[str, Any]:
    try:
        for model in models.values():
            model.check()
    except PipelineError as error:
        return to_dict(error)
    return {}
