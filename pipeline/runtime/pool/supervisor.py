"""The one thread that watches a pool: pipes to read, processes to start again, deadlines that pass.

It waits for whatever comes first, in the kernel, and never looks whether something has happened yet.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
import os
import select
import selectors
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import (
    LoadTimeoutError,
    PipelineError,
    PoolClosedError,
    PoolError,
    WorkerDiedError,
    error_named,
)
from pipeline.runtime.pool.crew import Member, PoolStats, WorkerEvent
from pipeline.runtime.pool.exchange import Exchange, Wires
from pipeline.runtime.pool.futures import Outcome, tell
from pipeline.runtime.pool.outbox import Outbox
from pipeline.runtime.pool.process import Channels, Process, StartMethod, start_process
from pipeline.runtime.pool.wire import Frame, FrameReader, Kind, decode_content, encode_frame

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_LONGEST_WAIT_S = 3600.0
_LAST_WAIT_S = 30.0
"""Seconds after which a process that was killed and does not end, being stuck in a driver, is left behind."""

_REFUSALS = 16
"""Requests in a row that a worker refused before it has to run its golden samples."""


@dataclass
class Life:
    """A worker's process while it lives.

    Attributes:
        process: The process.
        channels: Its pipes.
        reader: Makes frames of what it writes.
        outbox: What is to be written to it.
        is_told: Whether it was told to end.
        is_killed: Whether it was ended at once.
        is_blamed: Whether, if it ends, that is for the request it was at.
        reason: Why it was ended, if it was.
        broken: What it said when it could not start.
    """

    process: Process
    channels: Channels
    reader: FrameReader
    outbox: Outbox
    is_told: bool = False
    is_killed: bool = False
    is_blamed: bool = True
    reason: PipelineError | None = None
    broken: PipelineError | None = None


@dataclass(frozen=True)
class Rules:
    """How a supervisor goes about it.

    Attributes:
        job: What all workers are told, as JSON types.
        models: What each model's workers are told, by name.
        start_timeout_s: Seconds within which a worker must be ready.
        run_timeout_s: Seconds within which a request must be answered once a worker is at it.
        method: How processes are started.
        observer: Told of every event, on the supervisor's thread.
    """

    job: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    start_timeout_s: float
    run_timeout_s: float
    method: StartMethod
    observer: Callable[[WorkerEvent], None] | None


@dataclass
class Check:
    """A check of the golden samples by all workers that were ready when it began.

    Attributes:
        number: Tells it from others.
        until: When a worker that has not said is taken to hang.
        waiting: Workers that have not said yet.
        wrong: What was wrong, by worker.
        done: Set when all have.
    """

    number: int
    until: float
    waiting: set[int]
    wrong: dict[int, str] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def hear(self, worker: int, problem: str | None) -> None:
        """Notes what a worker said, or that it died."""
        if worker in self.waiting:
            self.waiting.discard(worker)
            if problem is not None:
                self.wrong[worker] = problem
        if not self.waiting:
            self.done.set()


class Supervisor:
    """Keeps a pool's workers alive and takes their answers.

    Args:
        members: The workers.
        rules: How to go about it.
        make_exchange: Makes the exchange, given its wires to this.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rules: Rules,
        make_exchange: Callable[[Wires], Exchange],
    ) -> None:
        self.members = tuple(members)
        self._rules = rules
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell.descriptor, selectors.EVENT_READ, self._hear_bell)
        self._lives: dict[int, Life] = {}
        self._checks: list[Check] = []
        self._check_numbers = itertools.count(1)
        self._planned = 0.0
        self._is_stale = True  # whether more has happened than answers, so that `_planned` may be too late
        self._stop_at: float | None = None
        self._is_over = False
        self.exchange = make_exchange(
            Wires(self._send, self.flush, self._watch, self._bell.ring, self.stop_soon)
        )
        self._lock = self.exchange.changed
        for member in self.members:
            self.exchange.add_worker(member.number, member.models)
        self._thread = threading.Thread(target=self._run, name="ortprep-pool", daemon=True)

    # From other threads.

    def start(self) -> None:
        """Starts the thread, which starts the workers."""
        self.exchange.gate.answering = self._thread
        self._thread.start()
        _RUNNING.add(self)

    def stop_soon(self, grace_s: float = 0.0) -> None:
        """Has the workers ended; takes no lock and waits for nothing, so the garbage collector may call it.

        Args:
            grace_s: Seconds a worker has for what it is at; 0 to end it at once.
        """
        until = time.monotonic() + grace_s
        self._stop_at = until if self._stop_at is None else min(self._stop_at, until)
        self._bell.ring()

    def stop(self, *, grace_s: float) -> None:
        """Ends the workers, waits for that, and fails what is still unanswered.

        Args:
            grace_s: Seconds a worker has for what it is at; 0 to end it at once.
        """
        self.stop_soon(grace_s)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(grace_s + 2 * _LAST_WAIT_S)

    def forget(self) -> None:
        """Makes this a closed pool without workers, in a process that was forked from the pool's."""
        self._is_over = True
        self._lock = self.exchange.forget(PoolClosedError("a pool cannot be used in a fork of its process"))
        for life in self._lives.values():
            life.channels.close()
        self._lives = {}

    def _watch(self, deadline: float) -> None:
        """Makes the thread wake up at a deadline if it would not anyway."""
        if deadline < self._planned:
            self._bell.ring()

    def wait_ready(self, count: int) -> None:
        """Waits until so many workers are ready.

        Raises:
            PipelineError: They never will be; what the first of those that failed said.
        """
        if not 0 <= count <= len(self.members):
            raise PoolError(f"bad number of workers\n  expected 0 to {len(self.members)}, got {count}")
        with self._lock:
            while not self._is_over:
                failed = [member for member in self.members if member.state == "failed"]
                if len(self._ready()) >= count:
                    return
                if len(self.members) - len(failed) < count:
                    raise failed[0].error or PoolError("workers failed")
                self._lock.wait()
        raise self.exchange.closed_error

    def begin_check(self, workers: Sequence[int] | None = None) -> Check:
        """Has workers that are ready run their golden samples.

        Args:
            workers: Which; None for all.

        Raises:
            PoolError: The pool is closed.
        """
        with self._lock:
            if self._is_over or self._stop_at is not None:
                raise self.exchange.closed_error
            ready = [number for number in self._ready() if workers is None or number in workers]
            # Each has its turn behind the requests it has.
            before = max((len(self.exchange.ledger.seat(number).sent) for number in ready), default=0)
            until = time.monotonic() + self._rules.run_timeout_s * (before + 1)
            check = Check(next(self._check_numbers), until, set(ready))
            self._checks.append(check)
            for worker in ready:
                self._send(worker, encode_frame(Frame(Kind.CHECK, request=check.number)))
            check.hear(-1, None)
        self.flush()
        self._watch(until)
        return check

    def stats(self) -> PoolStats:
        """Returns what everything is now."""
        exchange = self.exchange
        with self._lock:
            memory, (pending, waiting) = exchange.memory, exchange.counts
            return PoolStats(
                workers=tuple(
                    member.stats(len(exchange.ledger.seat(member.number).sent)) for member in self.members
                ),
                pending=pending,
                waiting=waiting,
                is_degraded=any(member.state == "failed" for member in self.members),
                shared_bytes=memory.held_bytes,
                used_bytes=memory.used_bytes,
                copied_in_bytes=exchange.copied.in_bytes,
                copied_out_bytes=exchange.copied.out_bytes,
            )

    def _ready(self) -> list[int]:
        return [member.number for member in self.members if member.state == "ready"]

    def _send(self, worker: int, data: bytes) -> None:
        """Puts frames down for a worker, with the lock held; `flush` writes them, without."""
        life = self._lives.get(worker)
        if life is not None:
            life.outbox.add(data)

    def flush(self) -> None:
        """Writes what was put down for workers."""
        is_done = False
        try:
            # A list, so that one that has no room does not keep the others from being written.
            written = [life.outbox.flush() for life in tuple(self._lives.values())]
            is_done = all(written)
        finally:
            if not is_done:
                self._bell.ring()  # the thread then waits for room, or sees what was broken off

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        except BaseException as error:  # the last border: without this thread nothing would ever be answered
            log.exception("the pool's supervisor failed")
            self.exchange.gate.close(PoolError(f"pool failed\n  {type(error).__name__}: {error}"))
            self._end()

    def _turn(self) -> None:
        if self._is_stale or time.monotonic() >= self._planned:
            self._is_stale = False
            self._look_at_clock()
            self._start_due()
            self._register_writers()
            with self._lock:
                self._planned = self._next_s()
            if self._is_over:
                return
        for key, _ in self._selector.select(max(0.0, self._planned - time.monotonic())):
            if key.fd in self._selector.get_map():  # else one before it ended the worker
                key.data()

    def _hear_bell(self) -> None:
        self._bell.hush()
        self._is_stale = True

    def _register_writers(self) -> None:
        for number, life in self._lives.items():
            if life.outbox.is_torn:
                reason = PoolError(f"a request to {self.members[number].name} was broken off by a signal")
                self._kill(self.members[number], reason, is_blamed=False)
                continue
            descriptor = life.outbox.descriptor
            if descriptor not in self._selector.get_map() and not life.outbox.flush():
                self._selector.register(
                    descriptor, selectors.EVENT_WRITE, functools.partial(self._go_on_writing, life)
                )

    def _go_on_writing(self, life: Life) -> None:
        if life.outbox.flush():
            self._selector.unregister(life.outbox.descriptor)

    def _next_s(self) -> float:
        """Returns when the clock has to be looked at next.

        Never later than a run may take from now, so that whoever sends a request need not wake this thread,
        and never further than the kernel can wait.
        """
        ledger = self.exchange.ledger
        times = [ledger.next_deadline(), ledger.next_stuck(self._rules.run_timeout_s)]
        times += [
            time.monotonic() + min(self._rules.run_timeout_s, _LONGEST_WAIT_S),
            *(check.until for check in self._checks),
        ]
        if self._stop_at is not None:
            if any(not life.is_killed for life in self._lives.values()) or not self._lives:
                times.append(self._stop_at)
            times.append(max(self._stop_at, time.monotonic()) + _LAST_WAIT_S)
        for member in self.members:
            if member.state == "waiting" and self._stop_at is None:
                times.append(member.start_again_at)
            elif member.state == "starting" and not self._is_killed(member):
                times.append(member.started_at + self._rules.start_timeout_s)
        return min(times)

    def _is_killed(self, member: Member) -> bool:
        life = self._lives.get(member.number)
        return life is not None and life.is_killed

    def _start_due(self) -> None:
        if self._stop_at is not None:
            return
        for member in self.members:
            if member.state == "waiting" and member.start_again_at <= time.monotonic():
                self._start(member)

    def _start(self, member: Member) -> None:
        member.begin(time.monotonic())
        self._observe(member)
        place = member.workplace
        job = {
            **self._rules.job,
            "models": [self._rules.models[name] for name in member.models],
            "device": place.device.name,
            "device_id": place.device_id,
            "environment": dict(place.environment),
            "threads": place.threads,
            "may_spin": place.may_spin,
            "processors": place.processors,
        }
        try:
            process, channels = start_process(job, self._rules.method)
        except Exception as error:  # noqa: BLE001 - multiprocessing raises many things where it cannot start
            reason = PoolError(f"cannot start {member.name}\n  {type(error).__name__}: {error}")
            # RuntimeError: multiprocessing's word for a program that has no `if __name__ == "__main__":`.
            self._bury(member, reason, is_hopeless=isinstance(error, RuntimeError), is_blamed=False)
            return
        life = Life(process, channels, FrameReader(member.name), Outbox(channels.requests))
        with self._lock:
            self._lives[member.number] = life
            member.pid = process.pid
        register = self._selector.register
        register(channels.replies, selectors.EVENT_READ, lambda: self._read_replies(member, life))
        register(channels.errors, selectors.EVENT_READ, lambda: self._read_errors(member, life))
        register(process.sentinel, selectors.EVENT_READ, lambda: self._has_ended(member, life))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        tell(self.exchange.expire())
        with self._lock:
            stuck = self.exchange.ledger.stuck(now, self._rules.run_timeout_s)
        for number in stuck:
            self._kill(self.members[number], self._took_too_long(number))
        for check in self._checks:
            if now >= check.until:
                check.until = math.inf  # once; they are heard as dead
                for worker in tuple(check.waiting):
                    self._kill(self.members[worker], self._took_too_long(worker), is_blamed=False)
        for member in self.members:
            if member.state == "starting" and now - member.started_at >= self._rules.start_timeout_s:
                error = LoadTimeoutError(
                    f"{member.name} was not ready in time\n"
                    f"  expected that within {self._rules.start_timeout_s:g} s",
                    hint="SessionPool(…, start_timeout_s=…)",
                )
                self._kill(member, error)
        if self._stop_at is not None:
            self._go_on_stopping(now)

    def _took_too_long(self, number: int) -> PipelineError:
        return PoolError(
            f"{self.members[number].name} was at one request for too long\n"
            f"  expected an answer within {self._rules.run_timeout_s:g} s",
            hint="SessionPool(…, run_timeout_s=…)",
        )

    # What workers say.

    def _read_replies(self, member: Member, life: Life) -> None:
        data = _read(life.channels.replies)
        if data is None:
            return
        if not data:
            self._selector.unregister(life.channels.replies)
            return
        done: list[Frame] = []
        try:
            for frame, payload in life.reader.read(data):
                if frame.kind is Kind.DONE:
                    done.append(frame)
                    continue
                # Answers are taken in the order in which they were given.
                self._take(member, done)
                done = []
                self._hear(member, life, frame, payload)
            self._take(member, done)
        except Exception as error:  # noqa: BLE001 - nothing a worker writes may end this thread
            wrong = error if isinstance(error, PoolError) else PoolError(f"unreadable message\n  {error}")
            log.error("%s: %s; ending it", member.name, wrong.message)
            self._kill(member, wrong)

    def _take(self, member: Member, frames: list[Frame]) -> None:
        if not frames:
            return
        answered = self.exchange.done(member.number, frames)
        member.served += len(answered.waited_s)
        member.refusals = 0
        member.latencies_s.extend(answered.waited_s)
        if answered.error is not None:
            # Before anybody is told, who might then ask it again. Those behind are not to blame.
            log.error("%s: %s; ending it", member.name, answered.error.message)
            self._kill(member, answered.error, is_blamed=not answered.is_told)
        tell(answered.outcomes)

    def _hear(self, member: Member, life: Life, frame: Frame, payload: bytes) -> None:
        if frame.kind is Kind.NEED:
            self.exchange.need(member.number, frame.request, frame.second.size)
            return
        self._is_stale = True
        content = decode_content(payload, member.name)
        if frame.kind is Kind.FAILED:
            outcome = self.exchange.failed(member.number, frame.request, _error_of(content))
            member.served += 1
            tell([outcome] if outcome is not None else [])
            self._count_refusal(member)
        elif frame.kind is Kind.PHASE:
            phase, seconds = str(content.get("phase")), _number(content.get("seconds"))
            member.phases_s[phase] = seconds
            self._observe(member, phase=phase, seconds=seconds)
        elif frame.kind is Kind.READY:
            self._has_become_ready(member, content)
        elif frame.kind is Kind.BROKEN:
            life.broken = _error_of(content)
        elif frame.kind is Kind.CHECKED:
            self._has_checked(member, frame.request, content)
        else:
            raise PoolError(f"unexpected message from {member.name}\n  got {frame.kind.name}")

    def _count_refusal(self, member: Member) -> None:
        """Has a worker that refuses one request after the other run its golden samples."""
        member.refusals += 1
        if member.refusals % _REFUSALS == 0:
            with suppress(PoolError):  # it is closed
                self.begin_check((member.number,))

    def _has_become_ready(self, member: Member, content: Mapping[str, Any]) -> None:
        with self._lock:
            variants, buckets = content.get("variants"), content.get("buckets")
            member.variants = dict(variants) if isinstance(variants, dict) else {}
            member.buckets = (
                {name: tuple(found) for name, found in buckets.items() if isinstance(found, list)}
                if isinstance(buckets, dict)
                else {}
            )
            member.private_bytes = int(_number(content.get("private_bytes")))
            member.become_ready(time.monotonic())
            self.exchange.open_worker(member.number)
        log.info("%s (pid %s) is ready after %.2f s", member.name, member.pid, member.start_s)
        self._observe(member)

    def _has_checked(self, member: Member, number: int, content: Mapping[str, Any]) -> None:
        error = _error_of(content) if content else None
        if error is not None:
            # Before anyone hears of it: who does then asks again, and this one must not answer.
            log.error("%s answers wrongly: %s; replacing it", member.name, error.message)
            self._kill(member, error, is_blamed=False)
        with self._lock:
            for check in self._checks:
                if check.number == number:
                    check.hear(member.number, None if error is None else str(error))
            self._checks = [check for check in self._checks if not check.done.is_set()]

    def _read_errors(self, member: Member, life: Life) -> None:
        data = _read(life.channels.errors)
        if data is None:
            return
        if not data:
            self._selector.unregister(life.channels.errors)
            return
        for line in member.said.add(data):
            log.debug("%s (pid %s) said: %s", member.name, member.pid, line)

    # How they end.

    def _kill(self, member: Member, reason: PipelineError, *, is_blamed: bool = True) -> None:
        self._is_stale = True
        life = self._lives.get(member.number)
        if life is not None and not life.is_killed:
            with self._lock:
                self.exchange.ledger.excuse(member.number)
                life.is_killed, life.reason, life.is_blamed = True, reason, is_blamed
            life.process.kill()

    def _has_ended(self, member: Member, life: Life) -> None:
        self._is_stale = True
        self._drain(member, life)
        channels = life.channels
        for descriptor in (channels.requests, channels.replies, channels.errors, life.process.sentinel):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
        pid = life.process.pid
        exit_code = life.process.reap()
        with self._lock:
            self.exchange.ledger.close_worker(member.number)
            del self._lives[member.number]
        life.outbox.close()
        channels.close()
        error = self._describe_end(member, life, pid, exit_code)
        is_hopeless = life.broken is not None and not member.was_ready
        self._bury(member, error, is_hopeless=is_hopeless, is_blamed=life.is_blamed)

    def _drain(self, member: Member, life: Life) -> None:
        """Reads what a worker wrote before it ended: requests that are answered are not to be blamed."""
        for descriptor, read in (
            (life.channels.replies, self._read_replies),
            (life.channels.errors, self._read_errors),
        ):
            while descriptor in self._selector.get_map() and _has_more(descriptor):
                read(member, life)

    def _describe_end(self, member: Member, life: Life, pid: int, exit_code: int | None) -> PipelineError:
        if life.broken is not None:
            return life.broken
        lines = member.said.lines
        said = "".join(f"\n    {line}" for line in lines)
        reason = "" if life.reason is None else f": {life.reason.message}"
        error = WorkerDiedError(
            f"{member.name} died{reason}\n  pid {pid}, {_describe_exit(exit_code)}{said}",
            hint=None if life.reason is None else life.reason.hint,
        )
        error.pid, error.returncode, error.stderr = pid, exit_code, lines
        return error

    def _bury(self, member: Member, error: PipelineError, *, is_hopeless: bool, is_blamed: bool) -> None:
        stopping = self._stop_at is not None
        with self._lock:
            if stopping:
                member.state, member.pid = "stopped", None
            else:
                member.die(time.monotonic(), error, is_hopeless=is_hopeless)
            for check in self._checks:
                check.hear(member.number, error.message)
            self._checks = [check for check in self._checks if not check.done.is_set()]
            told = self.exchange.closed_error if stopping else error
            outcomes = self.exchange.lose(member.number, told, is_blamed=is_blamed or stopping)
            self._lock.notify_all()
        try:
            if not stopping:
                self._report_end(member, error)
        finally:
            tell(outcomes)

    def _report_end(self, member: Member, error: PipelineError) -> None:
        self._observe(member, error=error)
        if member.state == "waiting":
            log.warning("%s; starting it again", error.message)
            return
        left = [other.name for other in self.members if other.state != "failed"]
        log.error("%s; given up, the pool goes on with %s", error.message, ", ".join(left) or "none")
        for model in member.models:
            if all(other.state == "failed" for other in self.members if model in other.models):
                gone = PoolError(f"no worker is left for {model}\n  {error.message}", hint=error.hint)
                tell(self.exchange.strand(model, gone))

    def _observe(
        self, member: Member, *, phase: str = "", seconds: float = 0.0, error: PipelineError | None = None
    ) -> None:
        if self._rules.observer is not None:
            event = WorkerEvent(member.number, member.name, member.state, phase, seconds, error)
            try:
                self._rules.observer(event)
            except BaseException:  # whoever watches must not be able to stop the pool
                log.exception("the pool's observer failed")

    # The end of it all.

    def _go_on_stopping(self, now: float) -> None:
        assert self._stop_at is not None
        self.exchange.gate.close(PoolClosedError("pool was closed"))
        with self._lock:
            for number, life in self._lives.items():
                if not life.is_told:
                    life.is_told = True
                    self.exchange.ledger.close_worker(number)
                    self._send(number, encode_frame(Frame(Kind.STOP)))
                if now >= self._stop_at and not life.is_killed:
                    self.exchange.ledger.excuse(number)
                    life.is_killed = True
                    life.process.kill()
        self.flush()
        if not self._lives or now >= self._stop_at + _LAST_WAIT_S:
            self._end()

    def _end(self) -> None:
        """Ends what is left, whatever state it is in, and tells everybody."""
        outcomes: list[Outcome] = []
        with self._lock:
            for life in self._lives.values():
                log.error("process %d does not end; leaving it behind", life.process.pid)
                with suppress(Exception):
                    life.process.kill()
                life.outbox.close()
                life.channels.close()
            self._lives.clear()
            outcomes = self.exchange.abort()
            self.exchange.arena.close()
            for member in self.members:
                member.state, member.pid = ("failed" if member.state == "failed" else "stopped"), None
            for check in self._checks:
                for worker in tuple(check.waiting):
                    check.hear(worker, "pool was closed")
            self._is_over = True
            self._lock.notify_all()
        self._selector.close()
        tell(outcomes)


class Bell:
    """Wakes the supervisor's thread; can be rung from everywhere, at any time."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Makes the descriptor readable."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.descriptor, 1)

    def hush(self) -> None:
        """Makes it unreadable again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        # Only now: whoever rings late must not write to what has the number since.
        os.close(self.descriptor)


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


def _read(descriptor: int) -> bytes | None:
    """Returns what is there, b"" at the end of the pipe, None if nothing is there yet."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None


def _has_more(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))


def _error_of(content: Mapping[str, Any]) -> PipelineError:
    hint = content.get("hint")
    return error_named(str(content.get("kind")))(
        str(content.get("message")), hint=None if hint is None else str(hint)
    )


def _number(value: object) -> float:
    """Returns a number of JSON; 0 for what is none that makes sense."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0.0


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
