"""The process that watches ONNX Runtime make and run sessions beside a ticking thread."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.gil.heartbeat import Call, GilObservations, Heartbeat
from ortprep.errors import ProviderError
from ortprep.runtime.loading.session import CPU, build_session, import_onnxruntime
from ortprep.runtime.tensors.arrays import read_tensors, run_session

_REPEATS = 3
_BUDGET_S = 3.0
_CONTROL_S = 0.06
_ROUNDS_OF_HASH = 10_000

T = TypeVar("T")


def watch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Watches the phases of a session, and a call that is known to let other threads run.

    Args:
        request: `plan`, a `SessionPlan` with one thread, which leaves a core to the ticking one; `sample`, a
            file of arrays by input name, or None to watch no runs.

    Returns:
        Fields of `GilObservations`.

    Raises:
        LoadError: The session cannot be made, or not on the provider that was asked for.
    """
    onnxruntime = import_onnxruntime()
    plan = decode(SessionPlan, request["plan"])
    # Through the public loader first: it reports errors in full, and loads libraries before the watch begins.
    session = build_session(plan)
    with Heartbeat() as heartbeat:
        released = tuple(heartbeat.observe(hold_core_only)[0] for _ in range(_REPEATS))
        phases = _watch_creation(heartbeat, plan)
        if request["sample"] is not None:
            feeds = read_tensors(Path(request["sample"]))
            phases["run"] = _repeat(lambda: heartbeat.observe(lambda: run_session(session, feeds))[0])
    return dict(encode(GilObservations(onnxruntime.__version__, phases, released)))


def hold_core_only() -> None:
    """Keeps a core busy and lets other threads run."""
    end = time.perf_counter() + _CONTROL_S
    while time.perf_counter() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", _ROUNDS_OF_HASH)


def _repeat(observe: Callable[[], T]) -> tuple[T, ...]:
    """Observes a few times; a long call is clear enough after one."""
    calls: list[T] = []
    started = time.perf_counter()
    while len(calls) < _REPEATS and time.perf_counter() - started < _BUDGET_S:
        calls.append(observe())
    return tuple(calls)


def _watch_creation(heartbeat: Heartbeat, plan: SessionPlan) -> dict[str, tuple[Call, ...]]:
    def load_and_initialise() -> tuple[Call, Call]:
        loaded, session = heartbeat.observe(lambda: _load(plan))
        initialised, _ = heartbeat.observe(lambda: _initialise(session, plan))
        if plan.providers[0].name not in session.get_providers():
            raise ProviderError(f"session did not get {plan.providers[0].name}: {plan.model}")
        return loaded, initialised

    try:
        loads, initialisations = zip(*_repeat(load_and_initialise), strict=True)
    except (AttributeError, TypeError):
        # The two steps are no part of ONNX Runtime's interface: a version may lack them.
        return {"create": _repeat(lambda: heartbeat.observe(lambda: build_session(plan))[0])}
    return {"load": loads, "initialise": initialisations}


def _load(plan: SessionPlan) -> Any:
    """Parses a model without initialising it: the first of two calls `onnxruntime.InferenceSession` makes."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options = import_onnxruntime().SessionOptions()
    options.intra_op_num_threads = 1
    return state.InferenceSession(options, plan.model, True, False)


def _initialise(session: Any, plan: SessionPlan) -> None:
    names = [provider.name for provider in plan.providers]
    if names == [CPU]:
        session.initialize_session([], [], set())
    else:
        session.initialize_session(names, [dict(provider.options) for provider in plan.providers], set())
