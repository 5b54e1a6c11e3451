"""What runs in a worker: it makes its sessions, then answers requests, one after the other.

A request stays in its lane's socket until it is its turn. So if the process ends, the kernel tells the pool
which requests it had not begun (`ECONNRESET`). Whatever goes wrong with a request is its answer; whatever
goes wrong with the worker ends the process, and the pool replaces it.
"""

from __future__ import annotations

import _socket
import errno
import gc
import os
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.codec import encode
from ortprep.errors import LoadError, PipelineError, to_dict
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.runtime.pool.process import die_with
from ortprep.telemetry import has_telemetry_thread

if TYPE_CHECKING:
    from ortprep.runtime.opened_model import OpenedModel
    from ortprep.runtime.pool.memory import Window
    from ortprep.runtime.pool.process import ModelJob, WorkerJob

_ANSWERED = PipelineError, MemoryError, OSError
"""Errors that are a request's answer; all others end the worker, which then was at that request."""


def main(job: WorkerJob) -> None:
    """Begins: makes the sessions a job names, and serves them until the pool ends it."""
    import_onnxruntime()
    # Only then: what imports numpy while ONNX Runtime is imported may find half of it.
    from ortprep.runtime import packets
    from ortprep.runtime.machine.memory import private_bytes, written_bytes
    from ortprep.runtime.pool.report import ReadyReport

    _, memory, *sockets = job.descriptors
    lanes = [_socket.socket(fileno=one) for one in sockets]
    threads = _count_threads()
    try:
        models = [open_served(model, job) for model in job.models]
    except PipelineError as error:
        packets.send_json(lanes[0], packets.FAILED, to_dict(error))
        _close(lanes)
        return
    ready = ReadyReport(
        variants={model.name: model.variant for model in models},
        private_bytes=private_bytes(),
        unfit=_find_unfit(models, threads) if job.is_template else "",
    )
    packets.send_json(lanes[0], packets.REPORT, encode(ready))
    if job.is_template:
        lanes, memory = fork_workers(lanes[0], job)  # comes back in each worker
        ready = replace(ready, private_bytes=written_bytes())
        packets.send_json(lanes[0], packets.REPORT, encode(ready))
    serve(lanes, memory, dict(zip([model.number for model in job.models], models, strict=True)))


def open_served(model: ModelJob, job: WorkerJob) -> OpenedModel:
    """Opens a bundle as the worker's job says, and runs its golden samples.

    Raises:
        PipelineError: As `ortprep.runtime.load` does; or the bundle is another than the pool's.
    """
    from ortprep.runtime.opened_model import open_model

    opened = open_model(
        model.bundle, job.load, name=model.name, device_id=job.device_id, for_fork=job.is_template
    )
    if encode(opened.config) != encode(model.config):
        raise LoadError(
            f"bundle was replaced by another build: {model.bundle}\n"
            f"  expected the build that the pool started with, since answers of two builds must not mix",
            hint="make a new pool",
        )
    return opened


def serve(lanes: Sequence[_socket.socket], memory: int, models: Mapping[int, OpenedModel]) -> None:
    """Answers requests, those of each lane in turn, until the pool closes the lanes."""
    from ortprep.runtime.pool.memory import WorkerMemory

    shared, served, poll = WorkerMemory(memory), {}, select.poll()
    for number, lane in enumerate(lanes):
        served[lane.fileno()] = lane, shared.requests(number), shared.answers(number)
        poll.register(lane.fileno(), select.POLLIN)
    try:
        while True:
            for descriptor, _ in poll.poll():
                if not _serve_one(*served[descriptor], models):
                    return
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone, or wants it no more
    finally:
        _close(lanes)


def _close(lanes: Sequence[_socket.socket]) -> None:
    for lane in lanes:
        lane.close()


def _serve_one(
    lane: _socket.socket, requests: Window, answers: Window, models: Mapping[int, OpenedModel]
) -> bool:
    """Answers the next request of a lane; returns whether there was one."""
    from ortprep.runtime import packets

    packet = packets.receive(lane, "the pool", requests)
    if packet is None:
        return False
    try:
        outputs = models[packet.model].run(packet.arrays)
        packets.send_arrays(lane, packets.DONE, outputs, answers, number=packet.number)
    except _ANSWERED as error:
        packets.send_json(lane, packets.FAILED, to_dict(error), number=packet.number)
    return True


def _find_unfit(models: Sequence[OpenedModel], threads: int) -> str:
    """Returns why a process with these models cannot be forked, given its threads before; empty if it can."""
    if has_telemetry_thread():
        return "usage data to be sent"
    if added := _count_threads() - threads:
        return f"{added} threads of ONNX Runtime"
    return next((why for model in models if (why := model.find_unfit())), "")


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def fork_workers(connection: _socket.socket, job: WorkerJob) -> tuple[list[_socket.socket], int]:
    """Forks a worker each time that the pool asks for one; returns in it, with its lanes and its memory.

    The template does nothing else, so whenever it forks, no run and no other thread is under way.
    """
    import socket

    from ortprep.runtime.pool.template import ANSWER, FORK, REAP

    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the program has none
        stream.flush()
    gc.freeze()  # else the first collection in a worker would write to all of these objects
    own = socket.socket(fileno=connection.detach())
    while True:
        packet, descriptors, _, _ = socket.recv_fds(own, len(FORK) + ANSWER.size, 16)
        if not packet:
            own.close()
            raise SystemExit  # the pool is gone, or wants it no more
        if packet.startswith(REAP):
            pid, _ = ANSWER.unpack(packet[len(REAP) :])
            _, status = os.waitpid(pid, 0)
            own.send(ANSWER.pack(pid, status))
            continue
        try:
            pid = os.fork()
        except OSError as error:
            own.send(ANSWER.pack(0, error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                own.close()
                return _become_worker(job, descriptors)
            own.send(ANSWER.pack(pid, 0))
        for descriptor in descriptors:
            os.close(descriptor)


def _become_worker(job: WorkerJob, descriptors: Sequence[int]) -> tuple[list[_socket.socket], int]:
    """Makes a fork a worker of its own; nothing of the template's that leads to the pool stays open."""
    death_pipe, memory, *lanes = descriptors
    die_with(death_pipe)
    os.setsid()
    for descriptor in job.descriptors[:2]:
        os.close(descriptor)
    return [_socket.socket(fileno=one) for one in lanes], memory
