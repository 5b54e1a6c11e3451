"""A pool's workers: started, listened to, and started again when they end; all on the supervisor's thread."""

from __future__ import annotations

import errno
import logging
import selectors
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ortprep.bundle.codec import decode
from ortprep.errors import PipelineError, PoolError, from_dict
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.memory import Region
from ortprep.runtime.pool.messages import (
    Head,
    MessageKind,
    ReadyReport,
    decode_head,
    decode_json,
)
from ortprep.runtime.pool.request_table import RequestTable
from ortprep.runtime.pool.slots import Slot
from ortprep.runtime.pool.worker_process import WorkerProcess
from ortprep.runtime.pool.worker_state import WorkerEvent, WorkerState

log = logging.getLogger(__name__)

_PACKETS_PER_TURN = 64
_MAX_TURN_BYTES = 2**24
"""Bytes of slots whose answers are copied before other workers, and deadlines, have their turn."""

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Why a process cannot be made now, although it may be later."""


class WorkerManager:
    """Starts workers, takes their messages, and starts them again when they end.

    Attributes:
        is_stale: Whether more has happened than answers, so that the clock has to be looked at.
        left_behind: Processes that were killed and do not end, and memory that each may still write to.
    """

    def __init__(self, workers: Sequence[WorkerState], config: PoolConfig, broker: RequestTable) -> None:
        self._workers, self._config, self._broker = workers, config, broker
        self.templates = tuple({one.name: one for worker in workers if (one := worker.template)}.values())
        self.everyone = (*workers, *self.templates)
        self._wakeup = broker.wakeup
        self.selector = selectors.DefaultSelector()
        self.is_stale = True
        self.left_behind: list[tuple[WorkerProcess, Region | None]] = []

    def ready(self) -> list[WorkerState]:
        """Returns the workers that take requests."""
        return [worker for worker in self._workers if worker.state == "ready"]

    def running(self) -> list[tuple[WorkerState, WorkerProcess]]:
        """Returns the workers that have a process, and that."""
        return [(worker, worker.process) for worker in self.everyone if worker.process is not None]

    def is_needed(self, template: WorkerState) -> bool:
        """Returns whether workers are forked from a template."""
        return any(worker.template is template for worker in self._workers)

    def processes(self) -> list[WorkerProcess]:
        """Returns every process that has not ended."""
        return [process for _, process in self.running()] + [process for process, _ in self.left_behind]

    def send_waiting(self) -> None:
        """Sends what workers had no room for, or waits for room."""
        for _, process in self.running():
            is_done = process.channel.flush()
            events = selectors.EVENT_READ if is_done else selectors.EVENT_READ | selectors.EVENT_WRITE
            key = self.selector.get_map().get(process.channel.descriptor)
            if key is not None and key.events != events:
                self.selector.modify(process.channel.descriptor, events, key.data)

    # How workers begin.

    def start(self, worker: WorkerState) -> None:
        """Starts a worker's process."""
        now, memory = time.monotonic(), self._broker.memory
        job = replace(worker.job, memory_bytes=len(memory.file.memory))
        template = None if worker.template is None else worker.template.process
        try:
            process = WorkerProcess(job, worker.variables, memory.file.descriptor, template)
        except OSError as error:
            if isinstance(error, ConnectionError) and worker.template is not None:
                self.kill(worker.template, PoolError(str(error)))
                return  # it is started from the next one
            text = f"cannot start {worker.name}\n  {error}"
            self._handle_exit(worker, PoolError(text, hint="ulimit -n; ulimit -u; free"), shortage=error)
            return
        if worker.template is not None:
            worker.template.served_now += 1  # that is what it is for, so its next death is the first again
        with self._broker.lock:
            worker.begin(now, process)
        self._observe(worker)
        for descriptor, call in (
            (process.channel.descriptor, self.read_packets),
            (process.output, self._read_output),
            (process.sentinel, self._has_ended),
        ):
            self.selector.register(descriptor, selectors.EVENT_READ, partial(call, worker, process))

    def fail_with_template(self, worker: WorkerState, template: WorkerState) -> None:
        """Gives a worker up whose template was given up."""
        self.is_stale = True
        worker.start_error = template.error or PoolError(f"{template.name} failed")
        with self._broker.lock:
            worker.error = worker.start_error
            worker.change("failed", pid=None)
            self._broker.notify()
        self._report_end(worker, worker.start_error)
        self._broker.resolve_ended()

    # What workers send.

    def read_packets(self, worker: WorkerState, process: WorkerProcess) -> bool:
        """Takes what a worker sent, and returns whether there may be more already."""
        try:
            is_over = self._take_packets(worker, process)
        except Exception as error:  # noqa: BLE001 - a boundary: whatever a worker sends ends no more than the worker
            wrong = error if isinstance(error, PoolError) else PoolError(f"unreadable message\n  {error}")
            log.error("%s: %s; ending it", worker.name, wrong.message)
            is_over = True
            self._unregister(process.channel.descriptor)
            self.kill(worker, wrong)
        # Only now: a caller may send the same again, and a worker that is ended must not answer.
        self._broker.resolve_ended()
        return not is_over

    def _take_packets(self, worker: WorkerState, process: WorkerProcess) -> bool:
        """Reads packets of a worker, and returns whether none is left to read."""
        replies: list[Slot] = []
        read_bytes = 0
        sent = self._broker.slots.queue_of(worker.number).sent
        try:
            for _ in range(_PACKETS_PER_TURN):
                packet = process.channel.receive()
                if packet is None:
                    return True
                if not packet:
                    self._unregister(process.channel.descriptor)
                    return True
                head = decode_head(packet, worker.name)
                if head.kind is MessageKind.DONE:
                    replies.append(self._broker.read(worker.number, head, packet, position=len(replies)))
                    read_bytes += replies[-1].written_bytes
                    if len(replies) >= len(sent) or read_bytes > _MAX_TURN_BYTES:
                        break  # no more to answer, and to look costs as much as to take one; or others wait
                    continue
                # Answers are taken in the order in which they were given.
                self._take_replies(worker, replies)
                self._handle(worker, head, decode_json(packet, worker.name))
        finally:
            self._take_replies(worker, replies)
        return False

    def _take_replies(self, worker: WorkerState, replies: list[Slot]) -> None:
        """Takes answers out of a list."""
        if replies:
            worker.note_answers(len(replies), self._broker.done(worker.number, replies))
            replies.clear()

    def _handle(self, worker: WorkerState, head: Head, content: Mapping[str, Any]) -> None:
        """Does what a worker's message says; raises `PoolError` for one that it may not send now."""
        self.is_stale = True
        is_starting = worker.state == "starting"
        if head.kind is MessageKind.FAILED:
            self._broker.failed(worker.number, head.number, from_dict(content))
            worker.note_answers(1)
        elif head.kind is MessageKind.READY and is_starting:
            self._has_become_ready(worker, decode(ReadyReport, content))
        elif head.kind is MessageKind.BROKEN and is_starting:
            worker.start_error = from_dict(content)
        else:
            raise PoolError(f"unexpected message from {worker.name}\n  got {head.kind.name}")

    def _has_become_ready(self, worker: WorkerState, report: ReadyReport) -> None:
        """Gives requests to a worker from now on; has others start without it, if it cannot be forked."""
        figures = {name: value for name, value in vars(report).items() if name != "unfit"}
        if report.unfit:
            log.info("%s cannot be forked: %s; starting each worker by itself", worker.name, report.unfit)
            for other in self._workers:
                other.template = None if other.template is worker else other.template
        with self._broker.lock:
            if worker.process is not None and not worker.is_killed:
                worker.become_ready(time.monotonic(), **figures)
                self._broker.open_worker(worker.number, worker.process.channel)
        log.info(
            "%s (pid %s) is ready after %.2f s",
            worker.name,
            worker.figures.pid,
            worker.figures.start_s or 0.0,
        )
        self._observe(worker)

    def _read_output(self, worker: WorkerState, process: WorkerProcess) -> bool:
        """Takes what a worker printed, and returns whether there may be more already."""
        data = process.read_output()
        if data == b"":
            self._unregister(process.output)
        for line in worker.output.add(data) if data else ():
            log.debug("%s (pid %s) said: %s", worker.name, process.pid, line)
        return bool(data)

    # How they end.

    def kill(self, worker: WorkerState, reason: PipelineError, *, fails_oldest: bool = True) -> None:
        """Ends a worker's process at once; if `fails_oldest`, as a failure of the request that it is at."""
        self.is_stale = True
        with self._broker.lock:
            self._broker.slots.close_worker(worker.number)
            if worker.process is not None and not worker.is_killed:
                worker.killed_at, worker.reason, worker.fails_oldest = time.monotonic(), reason, fails_oldest
                worker.process.kill()

    def _has_ended(self, worker: WorkerState, process: WorkerProcess) -> None:
        """Reads what a worker left, reaps it, and decides on its requests and its restart."""
        self.is_stale = True
        # What it sent before it ended: requests that are answered are not to be blamed.
        for descriptor, read in (
            (process.channel.descriptor, self.read_packets),
            (process.output, self._read_output),
        ):
            for _ in range(_PACKETS_PER_TURN):  # a child of the worker may write for ever
                if descriptor not in self.selector.get_map() or not read(worker, process):
                    break
        for descriptor in (process.channel.descriptor, process.output, process.sentinel):
            self._unregister(descriptor)
        error = worker.describe_end(process.pid, process.reap())
        with self._broker.lock:
            worker.process = None
        try:
            self._handle_exit(worker, error)
        finally:
            template = None if worker.template is None else worker.template.process
            if worker.template is not None and template is not None and template.channel.is_lost:
                template.orphans.append(process)  # reaped once its template, which could not, has ended
                self.kill(worker.template, PoolError("template does not answer"))
            else:
                process.close()

    def leave_behind(self, worker: WorkerState, process: WorkerProcess) -> None:
        """Goes on without a process that was killed and does not end, being stuck in a driver."""
        self.is_stale = True
        for descriptor in (process.channel.descriptor, process.output):
            self._unregister(descriptor)
        error = worker.describe_end(process.pid, None, "was killed and does not end")
        region = self._broker.set_aside(worker.number, error)
        if region is not None and not region.is_for_answer:
            worker.fails_oldest = False  # that request has failed, and those behind it have no part in it
        left = process, region
        self.left_behind.append(left)
        self.selector.modify(process.sentinel, selectors.EVENT_READ, partial(self._has_ended_late, *left))
        with self._broker.lock:
            worker.process = None
        self._handle_exit(worker, error)

    def _has_ended_late(self, process: WorkerProcess, region: Region | None) -> None:
        self._unregister(process.sentinel)
        self.left_behind.remove((process, region))
        process.reap()
        process.close()
        self._broker.give_back(region)

    def _unregister(self, descriptor: int) -> None:
        with suppress(KeyError):
            self.selector.unregister(descriptor)

    def _handle_exit(
        self, worker: WorkerState, error: PipelineError, *, shortage: OSError | None = None
    ) -> None:
        """Decides whether a worker starts again, and fails or moves the requests that it had."""
        is_stopping, now = self._wakeup.stop_at is not None, time.monotonic()
        if worker in self.templates and not self.is_needed(worker):
            is_stopping = True
        with self._broker.lock:
            if is_stopping:
                worker.change("stopped", pid=None)
            elif shortage is not None and shortage.errno in _SHORTAGES:
                worker.lack_room(now, error, timeout_s=self._config.start_timeout_s)
            else:
                worker.die(now, error, max_restarts=self._config.max_restarts)
            reason = self._broker.closed_error if is_stopping else error
            self._broker.lose(worker.number, reason, fails_oldest=worker.fails_oldest)
            self._broker.notify()
        if not is_stopping:
            self._report_end(worker, error)
        self._broker.resolve_ended()

    def _report_end(self, worker: WorkerState, error: PipelineError) -> None:
        """Logs the end of a worker; models that no worker is left for are unavailable."""
        self._observe(worker, error=error)
        if worker.state == "waiting":
            log.warning("%s; starting it again", error.message)
            return
        remaining = [other.name for other in self._workers if other.state != "failed"]
        log.error(
            "%s; giving up on it, the pool continues with %s", error.message, ", ".join(remaining) or "none"
        )
        for model in worker.models:
            if all(other.state == "failed" for other in self._workers if model in other.models):
                refusal = PoolError(f"no worker is left for {model}\n  {error.message}", hint=error.hint)
                self._broker.mark_unavailable(model, refusal)

    def _observe(self, worker: WorkerState, *, error: PipelineError | None = None) -> None:
        if self._config.observer is not None and worker not in self.templates:
            event = WorkerEvent(worker.number, worker.name, worker.state, error)
            try:
                self._config.observer(event)
            except BaseException:  # an observer must not be able to stop the pool
                log.exception("the pool's observer failed")
