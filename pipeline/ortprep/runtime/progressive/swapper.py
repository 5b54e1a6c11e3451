"""One session in service and a better one on its way: who serves, when they change, what happens at the end.

Nothing here depends on ONNX Runtime: sessions are whatever a function returns. A run holds the session that
it began on, so exchanging the one in service touches no run, and a session is freed when its last run ends.
"""

from __future__ import annotations

import _thread
import atexit
import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ortprep.errors import LoadError, LoadTimeoutError, PipelineError
from ortprep.runtime.loading.load_options import Cancellation

if TYPE_CHECKING:
    import logging

S = TypeVar("S")

Phase = Literal["first", "steady", "failed"]
"""`first`: the steady session is not in service yet; `steady`: it is; `failed`: it will never be, and the
first one stays in service."""

GRACE_S = 0.05
"""Seconds that a build waits after its start, so that the caller gets a result first: ONNX
Runtime before 1.31 lets no other Python code run while it makes a session."""


class SessionSwapper(Generic[S]):
    """Serves a first session until a steady one is built, by a thread of its own.

    `build` makes the steady session, and stops when it is cancelled; None if the first is the steady one.
    """

    def __init__(self, session: S, build: Callable[[Cancellation], S] | None, *, name: str) -> None:
        self._session: S | None = session
        self._build = build
        self._name = name
        self._phase: Phase = "steady" if build is None else "first"
        self._error: PipelineError | None = None
        self._closed = False
        self._begun = False
        self._thread: threading.Thread | None = None
        self._cancellation = Cancellation()
        self._hurried = threading.Event()
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if build is None:
            self._settled.set()

    @property
    def phase(self) -> Phase:
        """Which session serves; once it says `steady`, every later run is on the steady one."""
        return self._phase

    @property
    def error(self) -> PipelineError | None:
        """Why the steady session could not be built."""
        return self._error

    def current(self) -> S:
        """Returns the session in service, to keep and use; raises `LoadError` once it was closed."""
        session = self._session
        if session is None:
            raise self._closed_error()
        return session

    def start(self) -> None:
        """Has the steady session built from now on, if it is not yet; returns at once and never fails."""
        if self._build is None or self._begun:
            return
        with self._lock:
            if self._closed or self._begun:
                return
            self._begun = True
        try:
            _UNDER_WAY.enter(self.give_up)
            # `Thread.start` waits until the thread has run, up to 25 ms where others keep the processor busy
            # (measured), and the caller has an answer to return. So a thread that nobody waits for calls it.
            _thread.start_new_thread(self._start_thread, ())
        except RuntimeError as error:
            self._refuse(error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the steady session is in service, and has it built if nobody else does.

        Raises:
            LoadTimeoutError: The time passed; the build goes on.
            LoadError: It was closed.
            PipelineError: The steady session could not be built.
        """
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise LoadError(
                f"bad argument of wait_steady: timeout_s={timeout_s!r}\n  expected seconds, 0 or more"
            )
        self.start()
        self._hurried.set()
        if not self._settled.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise LoadTimeoutError(
                f"steady session is not in service yet: {self._name}\n  expected it within {timeout_s:g} s"
            )
        # Neither steady nor failed it is where the interpreter ends.
        if self._closed or self._phase == "first":
            raise self._closed_error()
        if self._error is not None:
            # A copy, since an error that is raised again and again gathers the frames of all who did.
            raise copy.copy(self._error)

    def close(self) -> None:
        """Takes the session out of service, gives up the build, and waits until its thread has ended."""
        with self._lock:
            self.abandon()
            self._settled.set()
        self.give_up()

    def abandon(self) -> None:
        """Does what `close` does, for nobody who waits: a collector calls it, in the middle of anything.

        So it takes no lock, not even that of an event: its own thread may be the one that holds it.
        """
        self._closed = True
        self._session = self._build = None
        self._cancellation.request()

    def give_up(self) -> None:
        """Stops the build and waits until its thread has ended; the first session stays in service."""
        self._cancellation.request()
        self._hurried.set()
        with self._lock:
            begun = self._begun
        if begun:
            self._ended.wait()
            if self._thread is not None:
                self._thread.join()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._succeed, name="ortprep-steady", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._refuse(error)

    def _refuse(self, error: RuntimeError) -> None:
        """No more threads, or the interpreter is about to end: that must not cost the caller an answer."""
        self._fail(LoadError(f"cannot start to build the steady session: {self._name}\n  {error}"))
        self._end()

    def _end(self) -> None:
        self._settled.set()
        self._ended.set()
        _UNDER_WAY.leave(self.give_up)

    def _succeed(self) -> None:
        try:
            self._hurried.wait(GRACE_S)
            build = self._build
            if build is not None and not self._cancellation.requested:
                self._build_with(build)
        finally:
            self._end()

    def _build_with(self, build: Callable[[Cancellation], S]) -> None:
        started = time.monotonic()
        try:
            session = build(self._cancellation)
        except PipelineError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  a border: nobody else is there to see it
            _log().debug("%s: building the steady session failed", self._name, exc_info=True)
            self._fail(
                LoadError(f"cannot build the steady session: {self._name}\n  {type(error).__name__}: {error}")
            )
        else:
            self._swap(session)
            _log().info("%s: steady session made in %.3f s", self._name, time.monotonic() - started)

    def _swap(self, session: S) -> None:
        with self._lock:
            if not self._closed:
                self._session, self._phase, self._build = session, "steady", None
                self._settled.set()

    def _fail(self, error: PipelineError) -> None:
        # Said before anybody who waits is woken.
        if not self._cancellation.requested:
            reason = " | ".join(line.strip() for line in error.message.splitlines())
            _log().warning("%s: the first session stays in service: %s", self._name, reason)
        with self._lock:
            if self._closed:
                return
            # A copy, since the frames of the error hold the session that was found wanting.
            self._error = copy.copy(error)
            self._phase, self._build = "failed", None
            self._settled.set()

    def _closed_error(self) -> LoadError:
        return LoadError(f"session is closed: {self._name}\n  expected one that is open")


def _log() -> logging.Logger:
    # Imported here, in the thread that builds: nothing is logged before the first result.
    import logging

    return logging.getLogger(__name__)


class _UnderWay:
    """The builds of this process, which end before the interpreter does.

    Its end would stop their threads in the middle of ONNX Runtime, which ends the process with a crash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: set[Callable[[], None]] = set()
        self._ending = False
        atexit.register(self.end)

    def enter(self, stop: Callable[[], None]) -> None:
        """Notes what stops a build; raises `RuntimeError` if it is too late to begin."""
        with self._lock:
            if self._ending:
                raise RuntimeError("the interpreter is ending")
            self._stops.add(stop)

    def leave(self, stop: Callable[[], None]) -> None:
        """Forgets a build that has ended."""
        with self._lock:
            self._stops.discard(stop)

    def end(self) -> None:
        """Stops every build and lets none begin."""
        with self._lock:
            self._ending = True
            stops = tuple(self._stops)
        for stop in stops:
            stop()


_UNDER_WAY = _UnderWay()
