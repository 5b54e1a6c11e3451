"""A worker's process: its job, how it is started and ended, and the event that wakes who watches it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.codec import encode as encode_record
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.pool.messages import MessageKind, encode_head
from ortprep.runtime.pool.packet_channel import PacketChannel

_READ_BYTES = 64 * 1024
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has glibc ask for huge pages: a worker's first run takes half as long over the pages that are new to it."""

_P_PIDFD = 3  # `os.P_PIDFD`, which builds of Python with older headers lack
_BOOTSTRAP = """\
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from ortprep.runtime.pool.worker_process import enter
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
class WorkerJob:
    """What a worker is to do.

    Attributes:
        entry: The function that it runs, `module:function`.
        path: Where modules are found.
        is_template: Whether it is to be forked for every worker, and serves nothing itself.
        device_id: CUDA ordinal inside the worker; None on the CPU.
        memory_bytes: Size of the memory file.
        descriptors: File descriptors: socket, parent-death pipe, output and memory file.
    """

    entry: str
    path: tuple[str, ...]
    models: tuple[ModelJob, ...]
    device_id: int | None
    load: ModelLoadOptions
    memory_bytes: int = 0
    is_template: bool = False
    descriptors: tuple[int, int, int, int] = (-1, -1, -1, -1)


class WorkerProcess:
    """A worker's process; raises `OSError` if there is none, or no descriptor, to be had.

    Args:
        job: What it is to do.
        environment: Variables of its environment, beside those of this process.
        memory: Descriptor of the memory file.
        template: Process that is to fork it, whose environment it has; None to start a fresh Python.

    Attributes:
        sentinel: A descriptor that becomes readable when it has ended.
        output: Descriptor from which its standard output and error are read.
        orphans: Workers that ended while their template, which this is, did not answer.
    """

    def __init__(
        self, job: WorkerJob, environment: Mapping[str, str], memory: int, template: WorkerProcess | None
    ) -> None:
        with ExitStack() as pool_ends:
            with ExitStack() as worker_ends:
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
                if template is None:
                    self._process: subprocess.Popen[bytes] | ForkedProcess = spawn(job, environment)
                    pool_ends.callback(self._process.wait)
                    pool_ends.callback(self._process.kill)
                else:
                    self._process = fork_from(template.channel, job)
            self.pid = self._process.pid
            self.sentinel = (
                os.pidfd_open(self.pid) if template is None else _open_fork(self.pid, template.pid)
            )
            pool_ends.pop_all()
        os.set_blocking(self.output, False)
        self.channel: PacketChannel = PacketChannel(pool_end)
        self.orphans: list[WorkerProcess] = []

    def read_output(self) -> bytes | None:
        """Returns what it printed, b"" at the end, None if there is nothing now."""
        try:
            return os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return None

    def kill(self) -> None:
        """Ends it at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def reap(self) -> int | None:
        """Waits until it has ended; returns its exit code, negative for a signal, None if that is lost."""
        code = self._process.wait()
        return self._reap_orphan() if code is None else code

    def _reap_orphan(self) -> int | None:
        """Returns the exit code of a process that its template's end made a child of this one, else None.

        That happens in the first process of a container, where it would stay a zombie.
        """
        with suppress(OSError):  # it is no child of this process, or the kernel is older than 5.4
            end = os.waitid(_P_PIDFD, self.sentinel, os.WEXITED | os.WNOHANG)
            if end is not None:
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return None

    def close(self, *, waits: bool = True) -> None:
        """Closes what leads to it, as `PacketChannel.close` does; the kernel ends it if it still runs."""
        for orphan in self.orphans:
            orphan._reap_orphan()
            orphan.close(waits=waits)
        self.channel.close(waits=waits)
        for descriptor in (self.output, self._death_pipe, self.sentinel):
            os.close(descriptor)


class WakeupEvent:
    """Wakes the supervisor, which waits in the kernel; it takes no lock, so it may be set at any time.

    Attributes:
        planned: When the supervisor looks at the clock next, by `time.monotonic()`.
        stop_at: When workers that were asked to end are killed; None while the pool goes on.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.planned = 0.0
        self.stop_at: float | None = None

    def set(self) -> None:
        """Wakes the supervisor now."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.descriptor, 1)

    def watch(self, deadline: float) -> None:
        """Wakes the supervisor if it would otherwise sleep beyond a deadline."""
        if deadline < self.planned:
            self.set()

    def stop_soon(self, grace_s: float = 0.0) -> None:
        """Has the supervisor end the workers, after `grace_s` seconds for what they are at."""
        until = time.monotonic() + grace_s
        self.stop_at = until if self.stop_at is None else min(self.stop_at, until)
        self.set()

    def clear(self) -> None:
        """Makes the descriptor unreadable again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        # Only now: a late caller of `set` must not write to what has the number since.
        if self.descriptor >= 0:
            os.close(self.descriptor)


def spawn(job: WorkerJob, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a fresh Python, never a fork of this process with its threads."""
    process = subprocess.Popen(
        # -P, so that a file of the working folder is never taken for a module.
        [sys.executable, "-P", "-c", _BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=job.descriptors[2],
        stderr=job.descriptors[2],
        env={**_HUGE_PAGES, **os.environ, **environment},
        pass_fds=job.descriptors,
        # A session of its own: Ctrl-C is for the program, which then ends its workers.
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:
        stream.write(json.dumps(encode_record(job)).encode())
    return process


class ForkedProcess:
    """A worker's process that a template forked, whose child it is: it reaps it when it is asked to."""

    def __init__(self, template: PacketChannel, pid: int) -> None:
        self._template, self.pid = template, pid

    def wait(self) -> int | None:
        """Waits until it has ended, and returns its exit code; None if its template does not answer."""
        try:
            head = self._template.ask(encode_head(MessageKind.REAP, self.pid), (), MessageKind.REAPED)
        except ConnectionError:
            return None
        return os.waitstatus_to_exitcode(head.figure)


def fork_from(template: PacketChannel, job: WorkerJob) -> ForkedProcess:
    """Has a template fork a worker, which has the template's environment.

    Raises:
        ConnectionError: The template does not answer.
        OSError: The system has no room for the process.
    """
    head = template.ask(encode_head(MessageKind.FORK), job.descriptors[:3], MessageKind.FORKED)
    if head.figure:
        raise OSError(head.figure, os.strerror(head.figure))
    return ForkedProcess(template, head.number)


def _open_fork(pid: int, template: int) -> int:
    """Returns a descriptor of the process that a template says it forked, which ends with its descriptors.

    Raises:
        ConnectionError: It is gone, or not the template's: to end it might be to end any other.
        OSError: No more files can be opened.
    """
    try:
        with ExitStack() as opened:
            descriptor = os.pidfd_open(pid)
            opened.callback(os.close, descriptor)
            parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) != template:
                raise ProcessLookupError(f"process {pid} is none of its children")
            opened.pop_all()
            return descriptor
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ConnectionError(f"cannot find what template {template} forked: {error}") from error


def enter(data: Mapping[str, object]) -> None:
    """Begins a worker's work; the first function in its process."""
    import importlib

    job = decode(WorkerJob, data)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in job.descriptors:
        os.set_inheritable(descriptor, False)  # by what it may start
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
