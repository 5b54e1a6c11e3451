"""A worker across restarts of its process: the one thread that starts it, watches it and starts it again."""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ortprep.errors import LoadTimeoutError, PipelineError, PoolClosedError, PoolError
from ortprep.runtime.pool.lane import Lane
from ortprep.runtime.pool.process import Wakeup, WorkerJob, WorkerProcess
from ortprep.runtime.pool.report import ReadyReport, WorkerStats, read_report
from ortprep.runtime.pool.template import Template, UnfitError

if TYPE_CHECKING:
    from ortprep.runtime.pool.config import PoolConfig
    from ortprep.runtime.pool.dispatch import Dispatcher

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 10.0
_STEADY_S = 30.0
_EXIT_TIMEOUT_S = 30.0
"""Seconds after which a process that was killed and does not end, being stuck in a driver, is left behind."""


class Worker:
    """A worker, from `start` until `stop`.

    Args:
        job: What its process does.
        variables: Variables of its environment.
        stats: Its number, name, device and models.
        template: What forks its process; None to start a fresh Python.
    """

    def __init__(
        self, job: WorkerJob, variables: Mapping[str, str], stats: WorkerStats, template: Template | None
    ) -> None:
        self.name, self.models = stats.name, frozenset(stats.models)
        self.job, self._variables, self._template = job, variables, template
        self._stats = stats
        self._process: WorkerProcess | None = None
        self._thread: threading.Thread | None = None
        self._wakeup = Wakeup()
        self._stop_at = math.inf
        self._error: PipelineError | None = None
        self._deaths_in_a_row = self._served_now = 0

    def start(self, config: PoolConfig, dispatcher: Dispatcher, workers: Sequence[Worker]) -> None:
        """Starts the thread; `workers` are all of the pool."""
        self._config, self._dispatcher, self._workers = config, dispatcher, workers
        thread = threading.Thread(target=self._run, name=f"ortprep-{self.name}", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, grace_s: float = 0.0) -> None:
        """Has the process end, after `grace_s` seconds for what it is at."""
        self._stop_at = min(self._stop_at, time.monotonic() + grace_s)
        self._wakeup.set()

    def join(self) -> None:
        """Waits until the worker has stopped, if it was started."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    # What it is now; the dispatcher's lock is held.

    @property
    def state(self) -> str:
        """What it is doing."""
        return self._stats.state

    @property
    def error(self) -> PipelineError | None:
        """Why it last failed or died."""
        return self._error

    def stats(self) -> WorkerStats:
        """Returns what it is now."""
        lanes = 0 if self._process is None else len(self._process.sockets)
        return replace(
            self._stats,
            in_flight=self._dispatcher.in_flight(self._process, lanes),
            error=None if self._error is None else str(self._error),
        )

    def note_answer(self) -> None:
        """Notes a request that it answered or refused."""
        with self._dispatcher.changed:
            self._served_now += 1
            self._stats = replace(self._stats, served=self._stats.served + 1)

    def _note(self, state: Any, error: PipelineError | None = None, **figures: Any) -> None:
        """Notes a new state."""
        with self._dispatcher.changed:
            self._error = error or (None if state == "ready" else self._error)
            self._stats = replace(self._stats, state=state, **figures)
            self._dispatcher.changed.notify_all()

    # The thread.

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at < math.inf

    def _run(self) -> None:
        """Starts the process, and again when it ends, in a thread of its own."""
        try:
            starts = 0
            while (process := self._begin(starts)) is not None:
                starts += 1
                self._goes_on(*self._watch(process))
        except BaseException as error:  # the last boundary: without this thread nothing is answered
            log.exception("the thread of %s failed", self.name)
            if self._process is not None:
                self._process.kill()
            self._give_up(PoolError(f"{self.name} failed\n  {type(error).__name__}: {error}"))
        if self.state != "failed":
            self._note("stopped", pid=None)

    def _begin(self, starts: int) -> WorkerProcess | None:
        """Starts the process, as soon as that is possible; returns None if there is to be none."""
        while not self._is_stopping and self.state != "failed":
            self._served_now = 0
            try:
                process = WorkerProcess(self.job, self._variables, self.name, self._wakeup, self._template)
            except UnfitError as error:
                log.info("%s cannot be forked: %s; starting it by itself", self.name, error)
                self._template = None
            except PipelineError as error:
                self._goes_on(error, cannot_start=not starts)
            except OSError as error:
                problem = f"cannot start {self.name}\n  {error}"
                self._goes_on(PoolError(problem, hint="ulimit -n; ulimit -u; free"))
            else:
                self._process = process
                self._note("starting", pid=process.pid, restarts=starts)
                return process
        return None

    def _watch(self, process: WorkerProcess) -> tuple[PipelineError, bool]:
        """Waits until the process has ended; returns why, and whether it could not start at all."""
        started, is_heard, is_ready, is_asked = time.monotonic(), False, False, False
        said = None
        while True:
            due = min(self._stop_at if is_asked else math.inf, process.killed_at + _EXIT_TIMEOUT_S)
            if not is_ready:
                due = min(due, started + self._config.start_timeout_s)
            event = process.listen(due, packets=not is_heard)
            now = time.monotonic()
            if event == "ended" or now >= process.killed_at + _EXIT_TIMEOUT_S:
                break
            if event == "packet":
                said = self._read_report(process, started)
                is_heard, is_ready = True, self.state == "ready"
            if self._is_stopping and not is_asked:
                process.ask_to_end()
                is_asked = True
            if event == "late" or (is_asked and now >= self._stop_at):
                process.kill(PoolClosedError("pool was closed") if is_asked else self._late())
        was_steady = is_ready and time.monotonic() - started >= _STEADY_S
        if was_steady or self._served_now:
            self._deaths_in_a_row = 0
        if event != "ended":
            log.error("process %d does not end; leaving it behind", process.pid)
        error = process.end(is_reaped=event == "ended", said=said)
        self._process = None
        self._dispatcher.retire(process)
        if not is_ready:
            process.close_sockets()
        return error, said is not None and self._stats.start_s is None

    def _late(self) -> LoadTimeoutError:
        return LoadTimeoutError(
            f"{self.name} was not ready in time\n  expected it within {self._config.start_timeout_s:g} s",
            hint="PoolConfig(start_timeout_s=…)",
        )

    def _read_report(self, process: WorkerProcess, started: float) -> PipelineError | None:
        """Reads what the process says: that it is ready, and may have requests, or why it cannot be."""
        try:
            report = read_report(process.sockets[0], self.name)
        except OSError:
            return None  # it has ended, which is seen next
        except PipelineError as error:
            process.kill(error)
            return None
        if not isinstance(report, ReadyReport):
            return report
        start_s = time.monotonic() - started
        self._note("ready", start_s=start_s, variants=report.variants, private_bytes=report.private_bytes)
        log.info("%s (pid %d) is ready after %.2f s", self.name, process.pid, start_s)
        timeout_s = self._config.run_timeout_s
        lanes = [Lane(self, process, number, timeout_s) for number in range(len(process.sockets))]
        self._dispatcher.open(process, lanes)
        return None

    def _goes_on(self, error: PipelineError, cannot_start: bool = False) -> None:
        """Decides whether there is to be another process, and waits until it may be started.

        The worker is given up after more than `max_restarts` deaths in a row; an answer, or 30 s of uptime,
        resets the count.
        """
        self._deaths_in_a_row += 1
        if self._is_stopping:
            return
        if cannot_start or self._deaths_in_a_row > self._config.max_restarts:
            self._give_up(error)
            return
        log.warning("%s; starting it again", error.message)
        self._note("waiting", error, pid=None)
        # Forked at once, the first time: there is nothing to wait for, and little to lose.
        if self._template is None or self._deaths_in_a_row > 1:
            self._pause(pause_before(self._deaths_in_a_row))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._wakeup.descriptor, select.POLLIN)
        while not self._is_stopping and (left_s := until - time.monotonic()) > 0:
            if poll.poll(left_s * 1e3):
                self._wakeup.clear()  # for the process that has ended

    def _give_up(self, error: PipelineError) -> None:
        """Notes that it failed for good; models that no worker is left for are unavailable."""
        self._note("failed", error, pid=None)
        left = [worker for worker in self._workers if worker.state != "failed"]
        names = ", ".join(worker.name for worker in left) or "none"
        log.error("%s; giving up on it, the pool continues with %s", error.message, names)
        for model in self.models.difference(*(worker.models for worker in left)):
            refusal = PoolError(f"no worker is left for {model}\n  {error.message}", hint=error.hint)
            self._dispatcher.fail(refusal, [model])


def pause_before(deaths_in_a_row: int) -> float:
    """Returns the seconds to wait before a worker is started again: 0.05, then twice as long each time."""
    return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (deaths_in_a_row - 1))
