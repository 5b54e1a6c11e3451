"""Two phases behind one session: the first is ready soon, the steady one is as fast per run as it gets.

The object that `load` returned stays. What changes is the native session inside it, which ONNX Runtime's
class keeps in an attribute: a run holds the native session that it began on, and that is freed when its last
run ends.
"""

from __future__ import annotations

import _thread
import atexit
import copy
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ortprep.runtime.loading.load_options import Cancellation
from ortprep.runtime.loading.opened_bundle import log_line, make_session, serve_with
from ortprep.runtime.loading.session import plain_session_class

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.session_record import SessionPlan
    from ortprep.errors import PipelineError
    from ortprep.runtime.loading.opened_bundle import OpenedBundle

STEADY = "_ortprep_steady"
"""Attribute of a session in two phases: its `SteadyBuild`."""

_RUNS = ("run", "run_with_ort_values", "run_with_ortvaluevector")

_ANY_PHASE = frozenset(
    {
        *_RUNS,
        "run_with_iobinding",
        "set_providers",
        "disable_fallback",
        "enable_fallback",
        "get_input_epdevices",
        "get_input_memory_infos",
        "get_inputs",
        "get_modelmeta",
        "get_output_memory_infos",
        "get_outputs",
        "get_overridable_initializers",
        "get_provider_options",
        "get_providers",
        "get_session_options",
    }
)
"""Methods that answer alike in either phase. All others (bindings, asynchronous runs, profiles, allocators,
tuning results) tie the caller to one native session, so they wait for the steady one."""

_OF_THE_CALLER = frozenset(
    {
        "_enable_fallback",
        "_model_bytes",
        "_model_path",
        "_read_config_from_model",
        "_sess_options_initial",
        STEADY,
    }
)
"""Attributes of a session that stay at the exchange; the others describe the native session."""

_GRACE_S = 0.05
"""Pause before a build, so that a process that ends after its first run has none to wait for."""

_RETRY_DELAY_S = 0.05
"""Pause of a build that gave way to a load, which then has the lock of its device first."""

_LOWEST_PRIORITY = 19


def may_swap() -> bool:
    """Returns whether a second session can be created here without holding up the first.

    ONNX Runtime before 1.31 keeps the interpreter to itself while it creates a session, and on a single core
    the first runs would have to share it with that.
    """
    import onnxruntime

    from ortprep.runtime.machine.processor import usable_cores

    major, minor, *_ = onnxruntime.__version__.split(".")
    return (int(major), int(minor)) >= (1, 31) and usable_cores() > 1


def serve_in_phases(opened: OpenedBundle) -> None:
    """Has the steady session of an opened bundle take over inside the first one, between two runs.

    A thread builds it, at the lowest priority, once a first run is done; that of the golden sample is one.
    If it cannot be built, the first one stays in service, and the reason is logged at WARNING.
    """
    # Not `opened` itself, which holds the first session.
    session, resolved, options = opened.session, opened.resolved, opened.later_options()
    options = options.replace(phases="steady", adapt=_beside_runs(options.adapt))

    def build(cancellation: Cancellation) -> onnxruntime.InferenceSession:
        _, made = make_session(resolved, options, cancellation=cancellation)
        return made

    steady = SteadyBuild(session, build, f"variant {resolved.name} of {resolved.root}")
    serve_steady(session, steady)
    if options.check == "golden":
        steady.start()


def serve_steady(session: Any, steady: SteadyBuild) -> None:
    """Has a session start a build after its first run."""
    serve_with(session, STEADY, steady, _phase_methods)
    weakref.finalize(session, steady.stop).atexit = False


def exchange_native(session: Any, other: Any) -> None:
    """Puts the native session of another session, and what describes it, into a session."""
    described = {name: value for name, value in vars(other).items() if name not in _OF_THE_CALLER}
    vars(session).update(described)


def _beside_runs(adapt: Callable[[SessionPlan], SessionPlan] | None) -> Callable[[SessionPlan], SessionPlan]:
    """Returns what adapts a plan so that one thread packs its weights, beside runs."""

    def adapt_beside_runs(plan: SessionPlan) -> SessionPlan:
        plan = plan if adapt is None else adapt(plan)
        entries = {**plan.session_options.config_entries}
        entries.pop("session.prepack.enable_parallel", None)
        return plan._replace(session_options=plan.session_options._replace(config_entries=entries))

    return adapt_beside_runs


def wait_steady(session: onnxruntime.InferenceSession, timeout_s: float | None = None) -> None:
    """Waits until a session runs on its variant's own plan, for ever from then on.

    A session that was not loaded in two phases does so from the start. The build begins now, if no run came
    before.

    Args:
        session: What `load` returned, or the drop-in created.
        timeout_s: Seconds to wait at most; None waits as long as it takes.

    Raises:
        LoadTimeoutError: The time passed; the steady session is still being created.
        PipelineError: It could not be created. The first one stays in service.
    """
    from ortprep.errors import LoadError, LoadTimeoutError

    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise LoadError(
            f"bad argument of wait_steady: timeout_s={timeout_s!r}\n  expected seconds, 0 or more"
        )
    steady: SteadyBuild | None = getattr(session, STEADY, None)
    if steady is None:
        return
    if not steady.wait(timeout_s):
        raise LoadTimeoutError(
            f"steady session is not in service yet: {steady.name}\n  expected it within {timeout_s:g} s"
        )
    if steady.error is not None:
        # A copy, since an error that is raised again and again gathers the frames of all who did.
        raise copy.copy(steady.error)


class SteadyBuild:
    """The steady session of one that serves in its first phase: built once, by one thread.

    Args:
        session: The session to put it into; it is not kept alive.
        build: Makes the steady session.
        name: What the log calls it.
        exchange: Puts its native session into the session.
    """

    def __init__(
        self,
        session: Any,
        build: Callable[[Cancellation], Any],
        name: str,
        *,
        exchange: Callable[[Any, Any], None] = exchange_native,
    ) -> None:
        self.name, self._exchange = name, exchange
        self.error: PipelineError | None = None
        self._session = weakref.ref(session)
        self._build: Callable[[Cancellation], Any] | None = build
        self._started = _thread.allocate_lock()
        self._attempt = Cancellation()
        self._is_requested = self._stopped = False
        self._hurried, self._ended = threading.Event(), threading.Event()
        self._process = os.getpid()

    def start(self) -> None:
        """Has the steady session built from now on, if it is not yet; returns at once and never fails."""
        if self._is_requested:
            return
        self._process = os.getpid()
        _UNDER_WAY.add(self)
        is_late = _INTERPRETER_ENDS.is_set()
        try:
            # No call between the two, after which a signal's handler may raise.
            self._is_requested = True
            if is_late:
                raise RuntimeError("the interpreter is ending")
            # Not `Thread.start`, which waits until the thread has run: up to 25 ms where others keep the
            # processor busy (measured), and the caller has an answer to return.
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            self._refuse(error)
            self._end()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until the build is over, and starts it if need be; returns whether it is."""
        self.start()
        self._hurried.set()
        if self._process != os.getpid() and not self._ended.is_set():
            # The thread of the build stayed in the process that this one was forked from.
            self._refuse(RuntimeError("this process was forked while it was being created"))
            self._ended.set()
        return self._ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def is_left_behind(self) -> bool:
        """Returns whether it began in another process, from which this one was forked."""
        return self._process != os.getpid() and self._is_requested and not self._stopped

    def stop(self) -> None:
        """Gives the build up; the first session stays in service.

        It takes no lock: the garbage collector calls it in the middle of anything.
        """
        self._stopped = True
        self._attempt.request()

    def end(self) -> None:
        """Stops the build for good, and waits until its thread has left ONNX Runtime."""
        self.stop()
        self._hurried.set()
        if self._started.acquire(blocking=False):  # so it never starts
            self._end()
        elif self._process == os.getpid():
            self._ended.wait()

    def _run(self) -> None:
        if not self._started.acquire(blocking=False):  # two threads asked for it at once, or it was ended
            return
        try:
            self._hurried.wait(_GRACE_S)
            while not self._stopped and not self._try():
                time.sleep(_RETRY_DELAY_S)
        finally:
            self._end()

    def _try(self) -> bool:
        """Builds and exchanges the session; returns False if it gave way to a load, and is to try again."""
        from ortprep.errors import PipelineError

        self._attempt = attempt = Cancellation()
        build = self._build
        if self._stopped or build is None:
            return True
        started = time.monotonic()
        try:
            with _lowest_priority():
                steady = build(attempt)
        except PipelineError as error:
            if attempt.requested:
                return self._stopped
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread's end: nobody else would see it
            self._refuse(error)
        else:
            session = self._session()
            if session is not None and not self._stopped:
                self._exchange(session, steady)
            log_line("info", "%s: steady session made in %.3f s", self.name, time.monotonic() - started)
        return True

    def _refuse(self, error: Exception) -> None:
        from ortprep.errors import LoadError

        reason = f"{type(error).__name__}: {error}"
        self._fail(LoadError(f"cannot build the steady session: {self.name}\n  {reason}"))

    def _fail(self, error: PipelineError) -> None:
        reason = " | ".join(line.strip() for line in error.message.splitlines())
        log_line("warning", "%s: the first session stays in service: %s", self.name, reason)
        # A copy, since the frames of the error hold the session that was found wanting.
        self.error = copy.copy(error)

    def _end(self) -> None:
        self._build = None
        _UNDER_WAY.discard(self)
        self._ended.set()


_UNDER_WAY: set[SteadyBuild] = set()
_INTERPRETER_ENDS = threading.Event()


@atexit.register
def _end_builds() -> None:
    """Ends the builds of this process before the interpreter does, which would stop them anywhere."""
    _INTERPRETER_ENDS.set()
    for build in tuple(_UNDER_WAY):
        build.end()


@contextmanager
def _lowest_priority() -> Iterator[None]:
    """Gives this thread the lowest priority for good, as soon as ONNX Runtime begins to initialise a session.

    Not before: the threads of the session, which its constructor starts, would inherit the priority, and no
    unprivileged process can raise it again.
    """

    def watch(_: object, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "initialize_session":
            os.setpriority(os.PRIO_PROCESS, _thread.get_native_id(), _LOWEST_PRIORITY)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def _phase_methods(own: Any) -> dict[str, Any]:
    """Returns the methods of a session's class for sessions that may change their native session."""
    methods: dict[str, Any] = {
        name: _started_after(getattr(own, name)) for name in _RUNS if hasattr(own, name)
    }
    for name in dir(plain_session_class()):
        method = getattr(own, name)
        if not name.startswith("_") and callable(method) and name not in _ANY_PHASE:
            methods[name] = _on_the_steady_one(method)
    methods["run_with_iobinding"] = _on_its_own_session(own.run_with_iobinding)
    methods["set_providers"] = _without_exchange(own.set_providers)
    return methods


def _started_after(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = method(self, *args, **kwargs)
        if self._ortprep_steady is not None:
            self._ortprep_steady.start()
        return outputs

    return run


def _on_the_steady_one(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ortprep_steady is not None:
            self._ortprep_steady.wait(None)
        return method(self, *args, **kwargs)

    return call


def _on_its_own_session(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that runs a binding on the session of the phase that made it."""

    @functools.wraps(method)
    def run_with_iobinding(self: Any, iobinding: Any, run_options: Any = None) -> None:
        # `IOBinding(session)` may have bound the first session, which it keeps.
        bound = iobinding._session
        if self._ortprep_steady is None or bound is self._sess:
            method(self, iobinding, run_options)
        else:
            bound.run_with_iobinding(iobinding._iobinding, run_options)
        if self._ortprep_steady is not None:
            self._ortprep_steady.start()

    return run_with_iobinding


def _without_exchange(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def set_providers(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._ortprep_steady is not None:
            self._ortprep_steady.end()
        method(self, *args, **kwargs)

    return set_providers
