"""The one thread that watches a pool: sockets to read, processes to start again, deadlines that pass.

It waits for whatever comes first, in the kernel, and never looks whether something has happened yet.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from ortprep.errors import LoadTimeoutError, PoolClosedError, PoolError
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.messages import MessageKind, encode_head
from ortprep.runtime.pool.request_table import RequestTable
from ortprep.runtime.pool.worker_manager import WorkerManager
from ortprep.runtime.pool.worker_process import WorkerProcess
from ortprep.runtime.pool.worker_state import PoolStats, WorkerState

log = logging.getLogger(__name__)

_MAX_WAIT_S = 3600.0
_EXIT_TIMEOUT_S = 30.0
"""Seconds after which a process that was killed and does not end, being stuck in a driver, is left behind."""


class Supervisor:
    """Keeps a pool's workers alive and takes their answers."""

    def __init__(self, workers: Sequence[WorkerState], config: PoolConfig, broker: RequestTable) -> None:
        self.workers = tuple(workers)
        self.manager = WorkerManager(self.workers, config, broker)
        self._config, self._broker = config, broker
        self._wakeup = broker.wakeup
        self._is_over = False
        self.manager.selector.register(self._wakeup.descriptor, selectors.EVENT_READ, self._has_woken)
        for worker in self.manager.everyone:
            broker.add_worker(worker.number, worker.models)
        self._thread = threading.Thread(target=self._run, name="ortprep-pool", daemon=True)

    # From other threads.

    def start(self) -> None:
        """Starts the thread, which starts the workers."""
        self._broker.answering = self._thread
        self._thread.start()
        _RUNNING.add(self)

    def stop(self, *, grace_s: float) -> None:
        """Ends the workers after `grace_s` seconds, waits for that, and fails what is still unanswered."""
        self._wakeup.stop_soon(grace_s)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(grace_s + 2 * _EXIT_TIMEOUT_S)

    def forget(self) -> None:
        """Makes this a closed pool without workers, in a process that was forked from the pool's."""
        self._is_over = True
        self._broker.forget(PoolClosedError("a pool cannot be used in a fork of its process"))
        for process in self.manager.processes():
            process.close(waits=False)
        for worker in self.manager.everyone:
            worker.process = None

    def wait_ready(self, count: int) -> None:
        """Waits until so many workers are ready; raises the first failure if they never will be."""
        if not 0 <= count <= len(self.workers):
            raise PoolError(f"bad number of workers\n  expected 0 to {len(self.workers)}, got {count}")
        change: threading.Lock | None = None
        while True:
            with self._broker.lock:
                if self._is_over:
                    raise self._broker.closed_error
                failed = [worker for worker in self.workers if worker.state == "failed"]
                if len(self.manager.ready()) >= count:
                    return
                if len(self.workers) - len(failed) < count:
                    raise failed[0].error or PoolError("workers failed")
                change = self._broker.next_change(change)
            change.acquire()

    def stats(self) -> PoolStats:
        """Returns what everything is now."""
        broker = self._broker
        with self._broker.lock:
            broker.collect()
            return PoolStats(
                workers=tuple(
                    worker.stats(len(broker.slots.queue_of(worker.number).sent)) for worker in self.workers
                ),
                pending=len(broker.slots),
                waiting=broker.slots.waiting,
                is_degraded=any(worker.state == "failed" for worker in self.workers),
                shared_bytes=broker.memory.held_bytes,
                used_bytes=broker.memory.used_bytes,
            )

    # The thread.

    def _run(self) -> None:
        """Takes turns until the pool is over, in a thread of its own."""
        try:
            while not self._is_over:
                self._turn()
        except (
            BaseException
        ) as error:  # the last boundary: without this thread nothing would ever be answered
            log.exception("the pool's supervisor failed")
            self._broker.close(PoolError(f"pool failed\n  {type(error).__name__}: {error}"))
            self._end()

    def _turn(self) -> None:
        """Does what is due by the clock, then waits for workers, or for what is due next."""
        if self.manager.is_stale or time.monotonic() >= self._wakeup.planned:
            self.manager.is_stale = False
            self._look_at_clock()
            if self._is_over:
                return
        for key, events in self.manager.selector.select(max(0.0, self._wakeup.planned - time.monotonic())):
            if events & selectors.EVENT_WRITE:
                self.manager.is_stale = True  # there is room for what waits to be sent
            if key.fd in self.manager.selector.get_map():  # else one before it ended the worker
                key.data()

    def _has_woken(self) -> None:
        self._wakeup.clear()
        self.manager.is_stale = True

    def _look_at_clock(self) -> None:
        """Does all that is due, and plans when to look again.

        That is never later than a run may take from now, so that a caller that sends a request need not wake
        this thread, and never further than the kernel can wait.
        """
        self._broker.expire()
        self._broker.resolve_ended()
        now = time.monotonic()
        for due_at, act in tuple(self._timers()):
            if due_at <= now and not self._is_over:
                act()
        self.manager.send_waiting()
        with self._broker.lock:
            latest = time.monotonic() + min(self._config.run_timeout_s, _MAX_WAIT_S)
            times = (due_at for due_at, _ in self._timers())
            self._wakeup.planned = min(latest, self._broker.slots.next_deadline(), *times)

    def _timers(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yields what is to be done, and when."""
        stop_at, running = self._wakeup.stop_at, self.manager.running()
        for worker, process in running:
            if worker.is_killed:
                yield worker.killed_at + _EXIT_TIMEOUT_S, partial(self.manager.leave_behind, worker, process)
            else:
                yield from self._timers_of(worker, process)
        if stop_at is not None:
            yield stop_at + _EXIT_TIMEOUT_S if running else -math.inf, self._end
            return
        templates = [template for template in self.manager.templates if self.manager.is_needed(template)]
        for worker in (*self.workers, *templates):
            template = worker.template
            if worker.state != "waiting":
                continue
            if template is None or (template.state == "ready" and not template.is_killed):
                yield worker.start_again_at, partial(self.manager.start, worker)
            elif template.state == "failed":
                yield -math.inf, partial(self.manager.fail_with_template, worker, template)

    def _timers_of(
        self, worker: WorkerState, process: WorkerProcess
    ) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yields the times, by `time.monotonic()`, at which a worker needs an action, and the action."""
        config, stop_at = self._config, self._wakeup.stop_at
        oldest_since = self._broker.slots.queue_of(worker.number).since
        yield oldest_since + config.run_timeout_s, partial(self._kill_stuck, worker, process)
        if worker.state == "starting":
            yield worker.started_at + config.start_timeout_s, partial(self._kill_late, worker)
        if worker in self.manager.templates:
            if self._is_done_with(worker):
                yield -math.inf, partial(self.manager.kill, worker, PoolError("no worker needs it"))
        elif stop_at is not None:
            if not worker.is_stop_sent:
                yield -math.inf, partial(self._ask_to_end, worker, process)
            closed = PoolClosedError("pool was closed")
            yield stop_at, partial(self.manager.kill, worker, closed, fails_oldest=False)

    def _is_done_with(self, template: WorkerState) -> bool:
        """Returns whether a template has no workers to fork, and none to reap."""
        if self._wakeup.stop_at is None:
            return not self.manager.is_needed(template)
        return all(worker.process is None for worker in self.workers)

    def _kill_late(self, worker: WorkerState) -> None:
        error = LoadTimeoutError(
            f"{worker.name} was not ready in time\n  expected it within {self._config.start_timeout_s:g} s",
            hint="PoolConfig(start_timeout_s=…)",
        )
        self.manager.kill(worker, error)

    def _kill_stuck(self, worker: WorkerState, process: WorkerProcess) -> None:
        """Ends a worker that takes too long, unless its answer is here: this thread may be late itself."""
        self.manager.read_packets(worker, process)
        due_at = self._broker.slots.queue_of(worker.number).since + self._config.run_timeout_s
        if worker.is_killed or due_at > time.monotonic():
            return
        error = PoolError(
            f"{worker.name} took too long for one request\n"
            f"  expected an answer within {self._config.run_timeout_s:g} s",
            hint="PoolConfig(run_timeout_s=…)",
        )
        self.manager.kill(worker, error)

    # How the pool ends.

    def _ask_to_end(self, worker: WorkerState, process: WorkerProcess) -> None:
        self._broker.close(PoolClosedError("pool was closed"))
        with self._broker.lock:
            worker.is_stop_sent = True
            self._broker.slots.close_worker(worker.number)
            process.channel.put(encode_head(MessageKind.STOP))

    def _end(self) -> None:
        """Ends what is left, whatever state it is in, and fails what is unanswered."""
        self._broker.close(PoolClosedError("pool was closed"))
        try:
            with self._broker.lock:
                self._is_over = True
                for process in self.manager.processes():
                    log.error("process %d does not end; leaving it behind", process.pid)
                    with suppress(OSError):
                        process.kill()
                    process.close()
                for worker in self.manager.everyone:
                    worker.process = None
                    worker.change("failed" if worker.state == "failed" else "stopped", pid=None)
                self._broker.notify()
                self._broker.abort()
        finally:
            self.manager.selector.close()
            self._broker.resolve_ended()


_RUNNING: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _stop_all() -> None:
    """Ends the pools that were never closed, before the interpreter is taken apart."""
    for supervisor in tuple(_RUNNING):
        supervisor.stop(grace_s=0.0)


def _forget_all() -> None:
    for supervisor in tuple(_RUNNING):
        supervisor.forget()
    _RUNNING.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
