"""A template: a process that has loaded the models, serves nothing, and is forked for every worker."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ortprep.errors import LoadTimeoutError, PipelineError, PoolError
from ortprep.runtime.pool.process import Wakeup, WorkerJob, WorkerProcess
from ortprep.runtime.pool.report import ReadyReport, read_report

ANSWER = struct.Struct("<qq")
"""What a template answers: a process and the error why there is none; or a process and how it ended."""

FORK, REAP = b"fork", b"reap"
_ASK_TIMEOUT_S = 1.0
_MAX_PID = 2**22  # of Linux, `PID_MAX_LIMIT`
_P_PIDFD = 3  # `os.P_PIDFD`, which builds of Python with older headers lack


class UnfitError(Exception):
    """The models cannot be inherited by a fork, for the reason that this says."""


class Template:
    """A process that forks workers; it is started when the first is wanted, and again when it has ended.

    Args:
        job: What workers are to do.
        environment: Variables of its environment, and so of theirs.
        name: Its name, for errors.
        start_timeout_s: Seconds within which it must have loaded the models.
    """

    def __init__(
        self, job: WorkerJob, environment: Mapping[str, str], name: str, start_timeout_s: float
    ) -> None:
        self._job, self._environment, self._name = job, environment, name
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._wakeup = Wakeup()
        self._is_stopped = False

    def fork(self, descriptors: Sequence[int]) -> ForkedProcess:
        """Forks a worker with these descriptors.

        Raises:
            UnfitError: The models cannot be inherited.
            PipelineError: They cannot be loaded.
            OSError: The system has no room for a process or a descriptor, or the template does not answer.
        """
        with self._lock:
            if self._is_stopped:
                raise ConnectionError("template was stopped")
            process = self._process = self._process or self._start()
            pid, error = self._ask(FORK, descriptors)
            if error:
                raise OSError(error, os.strerror(error))
            try:
                return ForkedProcess(self, process, pid, _open_fork(pid, process.pid))
            except ConnectionError as problem:
                self._end(PoolError(str(problem)))
                raise

    def reap(self, pid: int, parent: WorkerProcess) -> int | None:
        """Waits until a worker has ended, and returns its exit code; None if that is not known.

        `parent`: the process that forked it.
        """
        with self._lock:
            if self._process is not parent:
                return None
            with suppress(OSError):
                _, status = self._ask(REAP + ANSWER.pack(pid, 0), ())
                if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                    return os.waitstatus_to_exitcode(status)
                self._end(PoolError(f"template answers with an impossible end: {status}"))
            return None

    def _start(self) -> WorkerProcess:
        """Starts it, and waits until it has loaded the models; raises as `fork`."""
        process = WorkerProcess(self._job, self._environment, self._name, self._wakeup)
        until, event = time.monotonic() + self._start_timeout_s, "woken"
        while event == "woken" and not self._is_stopped:
            event = process.listen(until, packets=True)
        said: PipelineError | None = None
        if event == "packet":
            try:
                report = read_report(process.sockets[0], self._name)
                if isinstance(report, ReadyReport) and not report.unfit:
                    return process
                if isinstance(report, ReadyReport):
                    raise UnfitError(report.unfit)
                said = report
            except BaseException:  # whatever it says, it is of no use
                _end(process)
                raise
        elif event != "ended":
            process.kill(
                LoadTimeoutError(
                    f"{self._name} was not ready in time\n  expected it within {self._start_timeout_s:g} s",
                    hint="PoolConfig(start_timeout_s=…)",
                )
            )
        raise _end(process, said=said)

    def _ask(self, packet: bytes, descriptors: Sequence[int]) -> tuple[int, int]:
        """Sends a packet, with descriptors, and returns the answer; the lock is held.

        Raises:
            ConnectionError: No possible answer comes in time; the template is ended then.
        """
        assert self._process is not None
        sock = self._process.sockets[0]
        try:
            socket.send_fds(sock, [packet], descriptors)
            sock.settimeout(_ASK_TIMEOUT_S)
            answer = sock.recv(ANSWER.size + 1)
            if len(answer) != ANSWER.size:
                raise ConnectionError(f"got {len(answer)} bytes")
            number, figure = ANSWER.unpack(answer)
            is_other = packet != FORK and packet[len(REAP) :] != ANSWER.pack(number, 0)
            if is_other or not (0 <= number <= _MAX_PID and 0 <= figure < 2**16):
                raise ConnectionError(f"got impossible numbers: {number}, {figure}")
        except OSError as error:
            problem = f"template does not answer: {error}"
            self._end(PoolError(problem))
            raise ConnectionError(problem) from error
        return number, figure

    def _end(self, reason: PipelineError | None = None) -> None:
        """Ends its process, if it has one; the lock is held."""
        process, self._process = self._process, None
        if process is not None:
            _end(process, reason=reason)

    def interrupt(self) -> None:
        """Has it fork no more, also while it loads the models; it still reaps."""
        self._is_stopped = True
        self._wakeup.set()

    def stop(self) -> None:
        """Ends it for good."""
        with self._lock:
            self._end()


class ForkedProcess:
    """A worker's process that a template forked, whose child it is: it reaps it when it is asked to."""

    def __init__(self, template: Template, parent: WorkerProcess, pid: int, sentinel: int) -> None:
        self._template, self._parent = template, parent
        self.pid, self.sentinel = pid, sentinel

    def kill(self) -> None:
        """Ends it at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def wait(self) -> int | None:
        """Waits until it has ended, and returns its exit code; None if its template does not answer.

        If the template has ended before it, it is a child of this process in a container's first, where it
        would stay a zombie.
        """
        code = self._template.reap(self.pid, self._parent)
        if code is None:
            with suppress(OSError):  # it is no child of this process, or the kernel is older than 5.4
                end = os.waitid(_P_PIDFD, self.sentinel, os.WEXITED | os.WNOHANG)
                if end is not None:
                    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return code


def _end(
    process: WorkerProcess, *, reason: PipelineError | None = None, said: PipelineError | None = None
) -> PipelineError:
    """Ends a template's process; returns why it ended, which is what it said, if it said so."""
    process.kill(reason)
    error = process.end(said=said)
    process.close_sockets()
    return error


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
    except (FileNotFoundError, ProcessLookupError, OverflowError) as error:
        raise ConnectionError(f"cannot find what template {template} forked: {error}") from error
