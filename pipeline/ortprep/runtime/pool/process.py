"""A worker's process: its job, how it is started or forked, and how it ends."""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.file_lock import NO_FORK, forget_in_forks
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.errors import PipelineError, WorkerDiedError, describe_exit
from ortprep.runtime.descriptors import above_standard, close_aside
from ortprep.runtime.loading.model_load_options import ModelLoadOptions

if TYPE_CHECKING:
    from ortprep.runtime.pool.memory import WorkerMemory
    from ortprep.runtime.pool.template import ForkedProcess, Template

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has glibc ask for huge pages: a worker's first run takes half as long over the pages that are new to it."""

_BOOTSTRAP = """\
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from ortprep.runtime.pool.process import enter
enter(job)
"""

Event = Literal["packet", "ended", "woken", "late"]


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
        device_id: CUDA ordinal inside the worker; None on the CPU.
        is_template: Whether it is to be forked for every worker, and serves nothing itself.
        descriptors: File descriptors: parent-death pipe, memory, and a socket for each lane; a template has
            one socket.
    """

    entry: str
    path: tuple[str, ...]
    models: tuple[ModelJob, ...]
    device_id: int | None
    load: ModelLoadOptions
    is_template: bool = False
    descriptors: tuple[int, ...] = ()


class Wakeup:
    """Wakes a thread that waits in the kernel."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Wakes it, now or when it waits next."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Has it wait again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class WorkerProcess:
    """A worker's process, or a template's.

    Args:
        job: What it is to do.
        environment: Variables of its environment, beside those of this process.
        name: Of the worker, for errors.
        wakeup: Wakes the thread that listens.
        template: What is to fork it; None to start a fresh Python.

    Attributes:
        sockets: This end of each lane.
        memory: What both share.
        answered_s: When it last answered, by `time.monotonic()`.
        killed_at: When it was killed, by `time.monotonic()`; infinite for not at all.
        ended: Set when it has ended, once `error` says why.

    Raises:
        OSError: There is no process, or no descriptor, to be had.
        PipelineError: The template cannot load the models.
    """

    def __init__(
        self,
        job: WorkerJob,
        environment: Mapping[str, str],
        name: str,
        wakeup: Wakeup,
        template: Template | None = None,
    ) -> None:
        # Here, since it needs numpy, which workers import after ONNX Runtime.
        from ortprep.runtime.pool.memory import LANES, WorkerMemory

        self._held: set[int] = set()
        with ExitStack() as own, ExitStack() as given:
            own.callback(self.close)
            with NO_FORK:
                sockets = []
                for _ in range(1 if job.is_template else LANES):
                    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    own.callback(mine.close)
                    for one in (mine, its):
                        one.setblocking(True)  # whatever the program's default timeout is
                    sockets.append((mine, self._hold(its.detach())))
                self.sockets = tuple([mine for mine, _ in sockets])
                death_pipe, _ = map(self._hold, os.pipe())
                memory = self._hold(WorkerMemory.create())
                self.memory: WorkerMemory = WorkerMemory(memory)
                own.callback(self.memory.close)
                forget_in_forks(self)
            descriptors = (death_pipe, memory, *(its for _, its in sockets))
            given.callback(self._close, *descriptors)
            job = replace(job, descriptors=descriptors)
            if template is None:
                with NO_FORK:  # a fork that had the pipe to it would keep it waiting
                    self._process: subprocess.Popen[bytes] | ForkedProcess = spawn(job, environment)
                    own.callback(self._process.wait)
                    own.callback(self._process.kill)
                    self.sentinel = self._hold(os.pidfd_open(self._process.pid))
            else:
                self._process = template.fork(descriptors)
                self.sentinel = self._hold(self._process.sentinel)
            own.pop_all()
        self.pid, self.name = self._process.pid, name
        self.ended, self._ending = threading.Event(), threading.Lock()
        self.error: PipelineError = WorkerDiedError(f"{name} died")
        self._reason: PipelineError | None = None
        self._wakeup, self.answered_s, self.killed_at = wakeup, 0.0, math.inf
        self._poll = select.poll()
        for descriptor in (self.sentinel, wakeup.descriptor):
            self._poll.register(descriptor, select.POLLIN)

    def listen(self, until: float, *, packets: bool = False) -> Event:
        """Waits for what comes first.

        Args:
            until: When to stop waiting, by `time.monotonic()`.
            packets: Whether a packet on its first socket ends it.
        """
        first = self.sockets[0].fileno()
        if packets:
            self._poll.register(first, select.POLLIN)
        try:
            while True:
                left_s = until - time.monotonic()
                ready = dict(self._poll.poll(max(0.0, min(left_s, 3600.0)) * 1000))
                if first in ready:
                    return "packet"
                if self.sentinel in ready:
                    return "ended"
                if self._wakeup.descriptor in ready:
                    self._wakeup.clear()
                    return "woken"
                if left_s <= 0:
                    return "late"
        finally:
            if packets:
                self._poll.unregister(first)

    def kill(self, reason: PipelineError | None = None) -> None:
        """Ends it at once; of several reasons the first counts."""
        with self._ending:
            if not self.ended.is_set():
                if self.killed_at == math.inf:
                    self._reason, self.killed_at = reason, time.monotonic()
                    self._wakeup.set()
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Ends its lanes, after which it ends by itself."""
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def end(self, *, is_reaped: bool = True, said: PipelineError | None = None) -> PipelineError:
        """Reaps it, unless it does not end; returns why it ended, and closes it.

        `said`: why it could not start, in its own words.
        """
        code = None
        if is_reaped:
            code = self._process.wait()
        elif isinstance(self._process, subprocess.Popen):
            threading.Thread(target=self._process.wait, daemon=True).start()
        with self._ending:
            self.error = said or self._describe_end(code, is_reaped=is_reaped)
            self.ended.set()
            self.memory.close()
            self.close()
        self.ask_to_end()  # a process that is left behind still has the other ends
        return self.error

    def _describe_end(self, code: int | None, *, is_reaped: bool) -> PipelineError:
        end = "exit code unknown" if code is None else describe_exit(code)
        end = end if is_reaped else "was killed and does not end"
        reason = "" if self._reason is None else f": {self._reason.message}"
        error = WorkerDiedError(
            f"{self.name} died{reason}\n  pid {self.pid}, {end}",
            hint=None if self._reason is None else self._reason.hint,
        )
        error.pid, error.returncode = self.pid, code
        return error

    def _hold(self, descriptor: int) -> int:
        """Returns a descriptor that leads to it from now on, with a number that a process can be given."""
        descriptor = above_standard(descriptor)
        self._held.add(descriptor)
        return descriptor

    def _close(self, *descriptors: int) -> None:
        """Closes those of some descriptors that are still open."""
        for one in descriptors:
            if one in self._held:
                self._held.discard(one)
                os.close(one)

    def close(self) -> None:
        """Closes what leads to it but for its sockets; the kernel ends it if it still runs."""
        self._close(*self._held)

    def close_sockets(self) -> None:
        """Closes its sockets, if no lane has them."""
        for one in self.sockets:
            close_aside(one.close)

    def forget(self) -> None:
        """Closes all copies of what leads to it, in a fork of this process."""
        self.close()
        for one in self.sockets:
            one.close()
        self.memory.close()


def spawn(job: WorkerJob, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a fresh Python, never a fork of this process with its threads; it writes where this one does."""
    process = subprocess.Popen(
        # -P, so that a file of the working folder is never taken for a module.
        [sys.executable, "-P", "-c", _BOOTSTRAP],
        stdin=subprocess.PIPE,
        env={**_HUGE_PAGES, **os.environ, **environment},
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
        os.set_inheritable(descriptor, False)  # by what it may start
    die_with(job.descriptors[0])
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
