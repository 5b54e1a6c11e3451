"""A worker's process: its job, and how it is started and ended.

It is a fresh Python, never a fork of this process with its threads.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.pool.channel import PacketChannel
from ortprep.runtime.pool.messages import Span

_READ_BYTES = 64 * 1024
_BOOTSTRAP = """\
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from ortprep.runtime.pool.process import enter
enter(job)
"""


@dataclass(frozen=True)
class ModelJob:
    """A model that a worker serves."""

    number: int
    name: str
    bundle: str
    config: LoaderConfig


@dataclass(frozen=True)
class MemoryJob:
    """Which part of the shared memory a worker uses.

    Attributes:
        size: Size of the file, in bytes.
        status: Where the worker's page begins.
        taken: Blocks of its region that are in use.
        max_bytes: Most that its answers are to take, in use or idle.
    """

    size: int
    status: int
    region: Span
    taken: tuple[Span, ...]
    max_bytes: int


@dataclass(frozen=True)
class WorkerJob:
    """What a worker is to do.

    Attributes:
        entry: The function that it runs, `module:function`.
        path: Where modules are found.
        device_id: CUDA ordinal inside the worker; None on the CPU.
        processors: Processors it is kept to; None for all.
        memory: Its shared memory; None until the process is started.
        descriptors: File descriptors: socket, parent-death pipe, output and memory file.
    """

    entry: str
    path: tuple[str, ...]
    models: tuple[ModelJob, ...]
    device_id: int | None
    processors: tuple[int, ...] | None
    load: ModelLoadOptions
    memory: MemoryJob | None = None
    descriptors: tuple[int, int, int, int] = (-1, -1, -1, -1)


class WorkerProcess:
    """A worker's process; raises `OSError` if there is none, or no descriptor, to be had.

    Attributes:
        sentinel: A descriptor that becomes readable when it has ended.
        output: Descriptor from which its standard output and error are read.
    """

    def __init__(self, job: WorkerJob, environment: Mapping[str, str], memory: int) -> None:
        with ExitStack() as worker_ends, ExitStack() as pool_ends:
            pool_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pool_ends.callback(pool_end.close)
            worker_ends.callback(worker_end.close)
            self.output, output = os.pipe()
            pool_ends.callback(os.close, self.output)
            worker_ends.callback(os.close, output)
            death_pipe, self._death_pipe = os.pipe()
            pool_ends.callback(os.close, self._death_pipe)
            worker_ends.callback(os.close, death_pipe)
            job = replace(job, descriptors=(worker_end.fileno(), death_pipe, output, memory))
            self._process = _spawn(job, environment)
            pool_ends.callback(self.reap)
            pool_ends.callback(self.kill)
            self.pid = self._process.pid
            self.sentinel = os.pidfd_open(self.pid)
            pool_ends.pop_all()
        os.set_blocking(self.output, False)
        self.channel = PacketChannel(pool_end)

    def read_output(self) -> bytes | None:
        """Returns what it printed, b"" at the end, None if there is nothing now."""
        try:
            return os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return None

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def reap(self) -> int:
        """Waits until it has ended, and returns its exit code, negative for a signal."""
        return self._process.wait()

    def close(self, *, waits: bool = True) -> None:
        """Closes what leads to it, as `PacketChannel.close` does; the kernel ends it if it still runs."""
        self.channel.close(waits=waits)
        for descriptor in (self.output, self._death_pipe, self.sentinel):
            os.close(descriptor)


def _spawn(job: WorkerJob, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        # -P, so that a file of the working folder is never taken for a module.
        [sys.executable, "-P", "-c", _BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=job.descriptors[2],
        stderr=job.descriptors[2],
        env={**os.environ, **environment},
        pass_fds=job.descriptors,
        # A session of its own: Ctrl-C is for the program, which then ends its workers.
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:
        stream.write(json.dumps(encode(job)).encode())
    return process


def enter(data: Mapping[str, object]) -> None:
    """Begins a worker's work; the first function in its process."""
    import importlib

    job = decode(WorkerJob, data)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in job.descriptors:
        os.set_inheritable(descriptor, False)
    die_with(job.descriptors[1])
    module, _, name = job.entry.partition(":")
    getattr(importlib.import_module(module), name)(job)


def die_with(death_pipe: int) -> None:
    """Has the kernel kill this process when the other end of a pipe is closed, whatever it is doing then.

    A thread that waits for that would not do: ONNX Runtime before 1.31 keeps the interpreter to itself while
    it makes a session. `PR_SET_PDEATHSIG` would not either: it goes by the thread that started the process.
    """
    fcntl.fcntl(death_pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(death_pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(death_pipe, fcntl.F_SETFL, fcntl.fcntl(death_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(death_pipe, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)
