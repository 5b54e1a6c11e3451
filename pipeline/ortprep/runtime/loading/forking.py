"""Sessions that a fork inherits: loaded once in a parent, they run in every child at once.

ONNX Runtime itself promises nothing about forks. A session on one thread has none but the caller's, so a
child has all of it: it runs, and is freed, as in the parent (tried on 1.23.2, 1.31.1 and 1.32.0). With more
threads a child hangs or crashes (https://github.com/microsoft/onnxruntime/issues/9800). Pages stay shared
until one of them is written to.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ortprep.runtime.loading.bundle_loader import find_folder, open_folder
from ortprep.runtime.loading.load_options import Deadline, LoadOptions, check_choice, check_number
from ortprep.runtime.loading.opened_bundle import OpenedBundle, log_line, make_session, serve_with
from ortprep.runtime.loading.phases import STEADY, SteadyBuild, exchange_native, may_swap, serve_steady
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_VARIABLE, has_telemetry_thread

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.session_record import SessionPlan
    from ortprep.runtime.loading.load_options import Cancellation, CheckPolicy, DigestPolicy

_THREADS: Mapping[str, tuple[object, ...]] = {
    "intra_op_num_threads": (0, 1),
    "inter_op_num_threads": (0, 1),
    "execution_mode": ("ORT_SEQUENTIAL",),
    "use_per_session_threads": (True,),
}
"""Options that may add threads, and their values that add none to a session that `ortprep` puts on one."""

_COUNTED = ("run", "run_with_ort_values", "run_with_ortvaluevector", "run_with_iobinding", "io_binding")
"""Methods that need a native session that works here."""

_POLL_INTERVAL_S = 0.0005


def load_before_fork(
    bundle: str | os.PathLike[str],
    *,
    threads_after: int | None = None,
    digests: DigestPolicy = "changed",
    check: CheckPolicy = "none",
    timeout_s: float | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    precision: str = "fastest-within-gate",
    session_options: Mapping[str, str | int | bool] | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a bundle in a process that forks its workers: `gunicorn --preload`, a Celery or RQ master.

    The session has one thread, runs in this process and in every child, and takes no time to load there. A
    fork waits for the runs of other threads. Other sessions of this process, which have threads, must not be
    run in a child.

    Args:
        bundle: As for `load`; only variants for CPUs are taken.
        threads_after: Threads of a session that each child creates for itself in the background after its
            first run, and then runs on (ONNX Runtime 1.31, two cores); None to stay on the inherited one.
        digests: As for `load`.
        check: As for `load`.
        timeout_s: As for `load`.
        require_signature: As for `load`.
        precision: As for `load`.
        session_options: As for `load`, as values, and without threads: numbers of them are 0 or 1.

    Raises:
        LoadError: The options ask for threads, or ONNX Runtime was imported with its usage data on, which is
            a thread; else as `load`.
        PipelineError: As `load`.
    """
    check_choice("digests", digests, ("changed", "full", "off"))
    check_choice("check", check, ("none", "golden"))
    check_number("timeout_s", timeout_s, example=30)
    own = _check_options(session_options, threads_after)
    import_onnxruntime()
    _refuse_telemetry(bundle)
    folder = find_folder(bundle, require_signature)
    options = LoadOptions(
        target="cpu",
        digests=digests,
        check=check,
        precision=precision,
        deadline=Deadline(timeout_s, subject=folder),
        session_options=own,
        adapt=with_one_thread,
        require_signature=require_signature,
        may_spin=False,
    )
    opened = open_folder(folder, options)
    serve_forks(opened, threads_after)
    return opened.session


def serve_forks(opened: OpenedBundle, threads_after: int | None = None) -> None:
    """Has the session of an opened bundle, which has one thread, run in this process and in every child.

    Args:
        opened: The bundle, opened in one phase `with_one_thread`.
        threads_after: As for `load_before_fork`.
    """
    _ForkState(opened, threads_after).serve(opened.session)


def _refuse_telemetry(bundle: str | os.PathLike[str]) -> None:
    """Raises `LoadError` if ONNX Runtime has started the thread that sends usage data."""
    if has_telemetry_thread():
        from ortprep.errors import LoadError

        raise LoadError(
            f"a fork cannot inherit the thread with which ONNX Runtime sends usage data: {bundle}\n"
            f"  expected {TELEMETRY_VARIABLE}={TELEMETRY_OFF} before onnxruntime is imported, since children"
            " would hang at their exit",
            hint=f"export {TELEMETRY_VARIABLE}={TELEMETRY_OFF}",
        )


def _check_options(own: Any, threads_after: Any) -> dict[str, str | int | bool]:
    """Returns the application's options but for those about threads."""
    is_count = type(threads_after) is int and threads_after > 0
    asked = _find_threads(own) if hasattr(own, "items") else None
    if own is not None and not hasattr(own, "items"):
        problem = f"session_options is a {type(own).__name__}\n  expected values by attribute or config key"
    elif asked is not None:
        allowed = " or ".join(map(repr, _THREADS[asked]))
        problem = f"a fork cannot inherit threads\n  expected no {asked} in session_options, or {allowed}"
    elif threads_after is not None and not is_count:
        problem = f"threads_after={threads_after!r}\n  expected None, or a number from 1"
    else:
        from ortprep.runtime.loading.caller_options import read_options

        return read_options({name: own[name] for name in own or () if name not in _THREADS})
    from ortprep.errors import LoadError

    raise LoadError(
        f"bad argument of load_before_fork: {problem}", hint="load_before_fork(…, threads_after=2)"
    )


def _find_threads(own: Mapping[str, Any]) -> str | None:
    """Returns the first option whose value may add threads; an enumeration's value may be given itself."""
    values = {name: getattr(own[name], "name", own[name]) for name in _THREADS if name in own}
    return next((name for name, value in values.items() if value not in _THREADS[name]), None)


def _with_threads(plan: SessionPlan, *, threads: int) -> SessionPlan:
    """Returns a plan with so many threads within operators, and none between them."""
    attributes = {
        name: value for name, value in plan.session_options.attributes.items() if name not in _THREADS
    }
    attributes["intra_op_num_threads"] = threads
    return plan._replace(session_options=plan.session_options._replace(attributes=attributes))


with_one_thread: Callable[[SessionPlan], SessionPlan] = functools.partial(_with_threads, threads=1)
"""Returns a plan whose session a fork may inherit."""


def find_fork_obstacle(own: Any) -> str | None:
    """Returns what keeps forks from inheriting a session on a CPU: an option, or ONNX Runtime's telemetry.

    Args:
        own: An `onnxruntime.SessionOptions`; None for ONNX Runtime's defaults.
    """
    if has_telemetry_thread():
        return "usage data to be sent"
    if own is None:
        return None
    return _find_threads({name: getattr(own, name) for name in _THREADS if hasattr(own, name)})


class _ForkState:
    """Whether the native session of a forkable session works in this process, the parent or a child.

    Args:
        opened: The bundle with its session, which is not kept alive.
        threads_after: As for `load_before_fork`.
    """

    def __init__(self, opened: OpenedBundle, threads_after: int | None) -> None:
        self.running: set[int] = set()
        """Threads of this process that are in a run."""
        self.is_unusable = False
        """Whether the native session cannot run here: it was running in the parent."""
        self._inherited: types.SimpleNamespace | None = None
        """What describes the session with one thread, where one with threads has taken over."""
        self._resolved, self._options = opened.resolved, opened.later_options()
        self.name = f"variant {opened.resolved.name} of {opened.resolved.root}"
        self._adapt_after = None
        if threads_after is not None and may_swap():
            self._adapt_after = functools.partial(_with_threads, threads=threads_after)
        elif threads_after is not None:
            log_line("warning", "%s: threads_after needs ONNX Runtime 1.31 and two cores", self.name)

    def serve(self, session: Any) -> None:
        """Has a session keep count of its runs."""
        serve_with(session, "_ortprep_forks", self, _count_runs)
        _SESSIONS.add(session)

    def _new_build(self, session: Any) -> SteadyBuild:
        options = self._options.replace(adapt=self._adapt_after)

        def build(cancellation: Cancellation) -> onnxruntime.InferenceSession:
            return make_session(self._resolved, options, cancellation=cancellation)[1]

        return SteadyBuild(session, build, self.name, exchange=self._exchange)

    def _exchange(self, session: Any, other: Any) -> None:
        self._inherited = types.SimpleNamespace(**vars(session))  # first: a fork may come between the two
        exchange_native(session, other)

    def is_running_elsewhere(self) -> bool:
        """Returns whether another thread is in a run."""
        return bool(self.running - {_thread.get_ident()})

    def enter_child(self, session: Any) -> None:
        """Has a child run the native session with one thread, as the process that loaded does.

        One with threads is built in children alone: the process that loaded is to have no thread.
        """
        # Only a fork in C, of which Python does not know beforehand, comes in the middle of a run.
        self.is_unusable = self.is_unusable or self.is_running_elsewhere()
        self.running.clear()
        if self.is_unusable or self._inherited is not None:
            # Never freed: ONNX Runtime would wait for threads that stayed in the parent.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session._sess))
        if self._inherited is not None:
            exchange_native(session, self._inherited)
            self._inherited = None
        steady: SteadyBuild | None = getattr(session, STEADY, None)
        if self._adapt_after is not None and (steady is None or steady.is_left_behind()):
            serve_steady(session, self._new_build(session))


_SESSIONS: weakref.WeakSet[Any] = weakref.WeakSet()

_FORKS: list[None] = []
"""An item per fork that is under way: no run begins."""


def _before_fork() -> None:
    """Waits for the runs of other threads: a child cannot run a session that is in the middle of one."""
    _FORKS.append(None)
    is_over = False
    while not is_over:
        # Python would drop what a signal's handler raises here, and fork.
        with contextlib.suppress(BaseException):
            is_over = not any(session._ortprep_forks.is_running_elsewhere() for session in tuple(_SESSIONS))
            if not is_over:
                time.sleep(_POLL_INTERVAL_S)


def _after_fork() -> None:
    _FORKS.clear()
    for session in tuple(_SESSIONS):
        session._ortprep_forks.enter_child(session)


def _end_fork() -> None:
    del _FORKS[-1:]


os.register_at_fork(before=_before_fork, after_in_parent=_end_fork, after_in_child=_after_fork)


def _count_runs(own: Any) -> Mapping[str, Any]:
    """Returns the methods of a session's class that keep count of runs."""
    return {name: _counted(getattr(own, name)) for name in _COUNTED if hasattr(own, name)}


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that marks its thread as running, and does not begin during a fork."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: _ForkState | None = self._ortprep_forks
        thread = _thread.get_ident()
        if state is None or thread in state.running:
            return method(self, *args, **kwargs)
        if state.is_unusable:
            raise _forked_in_a_run(state.name)
        try:
            state.running.add(thread)  # before the look, so that either this thread or a fork waits
            while _FORKS:
                state.running.discard(thread)
                time.sleep(_POLL_INTERVAL_S)
                state.running.add(thread)
            return method(self, *args, **kwargs)
        finally:
            state.running.discard(thread)

    return run


def _forked_in_a_run(name: str) -> Exception:
    from ortprep.errors import LoadError

    return LoadError(
        f"cannot run after this fork: {name}\n"
        "  expected a fork by Python, which waits until no other thread runs the session",
        hint="load it in the child",
    )
