"""Starting and ending a worker's process: a fresh one, or a fork of a server that holds no session.

Never a fork of this process, which may have threads, and ONNX Runtime's at that.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

StartMethod = Literal["spawn", "forkserver"]
"""`spawn`: a fresh Python process. `forkserver`: a fork of multiprocessing's server, which starts sooner and
needs what multiprocessing needs: a program that can be imported without running."""

_BOOTSTRAP = """\
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from pipeline.runtime.pool.process import enter
enter(job)
"""


class Process(Protocol):
    """A worker's process.

    Attributes:
        pid: Its number.
        sentinel: A descriptor that becomes readable when it has ended.
    """

    pid: int
    sentinel: int

    def kill(self) -> None:
        """Ends it at once."""

    def reap(self) -> int | None:
        """Waits until it has ended, and returns its exit code, negative for a signal, if that is known."""


@dataclass
class Channels:
    """The parent's ends of a worker's pipes.

    Attributes:
        requests: Where frames are written.
        replies: Where frames are read.
        errors: Where the worker's standard output and error are read.
        lifeline: Never written to; when this process ends, however it ends, the kernel closes it and kills
            the worker.
    """

    requests: int
    replies: int
    errors: int
    lifeline: int

    def close(self) -> None:
        """Closes all of them."""
        for descriptor in (self.requests, self.replies, self.errors, self.lifeline):
            with suppress(OSError):
                os.close(descriptor)


def start_process(job: Mapping[str, Any], method: StartMethod) -> tuple[Process, Channels]:
    """Starts a worker.

    Args:
        job: What it is to do, as JSON types; `entry` names the function, `module:function`.
        method: How.

    Raises:
        OSError: There is no process, or no descriptor, to be had.
    """
    with ExitStack() as theirs_closed, ExitStack() as ours_closed:
        pipes = [_pipe(ours_closed, theirs_closed, ours_reads=reads) for reads in (False, True, True, False)]
        ours = Channels(*(pipe[0] for pipe in pipes))
        theirs = tuple(pipe[1] for pipe in pipes)
        start = _SpawnedProcess if method == "spawn" else _ForkedProcess
        process = start({**job, "path": [str(entry) or str(Path.cwd()) for entry in sys.path]}, theirs)
        ours_closed.pop_all()
    for descriptor in (ours.requests, ours.replies, ours.errors):
        os.set_blocking(descriptor, False)
    return process, ours


def _pipe(ours: ExitStack, theirs: ExitStack, *, ours_reads: bool) -> tuple[int, int]:
    """Returns this process's end of a new pipe and the worker's, each to be closed with its stack."""
    out, in_ = os.pipe()
    mine, its = (out, in_) if ours_reads else (in_, out)
    ours.callback(os.close, mine)
    theirs.callback(os.close, its)
    return mine, its


class _SpawnedProcess:
    def __init__(self, job: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        text = json.dumps({**job, "descriptors": descriptors}).encode()
        self._process = subprocess.Popen(
            # -P, so that a file of the working folder is never taken for a module.
            [sys.executable, "-P", "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=descriptors[2],
            stderr=descriptors[2],
            env={**os.environ, **job["environment"]},
            pass_fds=descriptors,
            # A session of its own: Ctrl-C is for the program, which then ends its workers.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(text)

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> int | None:
        code = self._process.wait()
        with suppress(OSError):
            os.close(self.sentinel)
        return code


class _ForkedProcess:
    def __init__(self, job: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server itself must never import ONNX Runtime, which the caller's program may do.
        context.set_forkserver_preload(["pipeline.runtime.pool.worker"])
        # Only connections know how to get to a process that this one does not fork itself.
        # The server has the environment of when it was started.
        text = json.dumps({**job, "environment": {**os.environ, **job["environment"]}})
        connections = [Connection(os.dup(descriptor)) for descriptor in descriptors]
        self._process = context.Process(
            target=_enter_forked,
            args=(text, connections),
            name="ortprep-worker",
            daemon=True,
        )
        try:
            self._process.start()
        finally:
            for connection in connections:
                connection.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        # Multiprocessing's own sentinel also fires when its server dies, while the worker may still write.
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def reap(self) -> int | None:
        select.select([self.sentinel], [], [])
        os.close(self.sentinel)
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        return code


def _enter_forked(text: str, connections: list[Connection]) -> None:
    job = json.loads(text)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.setsid()
    job["descriptors"] = [connection.fileno() for connection in connections]
    for standard in (1, 2):
        os.dup2(job["descriptors"][2], standard)
    enter(job)


def enter(job: Mapping[str, Any]) -> None:
    """Begins a worker's work; the first function in its process.

    Args:
        job: As `start_process` was given it, with `descriptors`: the worker's ends of its pipes.
    """
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in job["descriptors"]:
        os.set_inheritable(descriptor, False)
    die_with(job["descriptors"][3])
    module, _, name = job["entry"].partition(":")
    getattr(importlib.import_module(module), name)(job)


def die_with(lifeline: int) -> None:
    """Has the kernel kill this process when the other end of a pipe is closed, whatever it is doing then.

    A thread that waits for that would not do: ONNX Runtime before 1.31 keeps the interpreter to itself while
    it makes a session. `PR_SET_PDEATHSIG` would not either: it goes by the thread that started the process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)
