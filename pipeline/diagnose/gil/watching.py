"""What the process does that watches ONNX Runtime make and run sessions beside a ticking thread."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.bundle.session_record import SessionPlan
from pipeline.diagnose.gil.ticking import Call, Ticker
from pipeline.errors import ProviderError
from pipeline.runtime.loading.session import CPU, build_session, default_plan, import_onnxruntime
from pipeline.runtime.tensors import read_tensors, run_session

_REPEATS = 3
_ENOUGH_S = 3.0
_CONTROL_S = 0.06
_ROUNDS_OF_HASH = 10_000

Calls = dict[str, list[Call]]


def watch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Watches the phases of a session, and two things that are known beforehand.

    Args:
        request: `model`, the path of an ONNX file; `provider` and `provider_options`; `sample`, a file of
            arrays by input name, or None to watch no runs.

    Returns:
        `onnxruntime`, and lists of the fields of `Call`: `phases` by name, `released` and `held`.

    Raises:
        LoadError: The session cannot be made, or not on the provider that was asked for.
    """
    onnxruntime = import_onnxruntime()
    # One thread, which leaves a core to the ticking one.
    plan = default_plan(
        request["model"],
        request["provider"],
        attributes={"intra_op_num_threads": 1},
        provider_options=request["provider_options"],
    )
    # First of all through the front door: what is wrong with the model or the provider is said in full, and
    # libraries are loaded, which is not what is watched.
    runs = _prepare_runs(build_session(plan), request["sample"])
    with Ticker() as ticker:
        released = [ticker.observe(hold_core_only)[0] for _ in range(_REPEATS)]
        held = [ticker.observe(hold_interpreter)[0] for _ in range(_REPEATS)]
        phases = _watch_creation(ticker, plan)
        if runs is not None:
            phases["run"] = _repeat(lambda: ticker.observe(runs)[0])
    return {
        "onnxruntime": onnxruntime.__version__,
        "phases": {phase: [asdict(call) for call in calls] for phase, calls in phases.items()},
        "released": [asdict(call) for call in released],
        "held": [asdict(call) for call in held],
    }


def hold_core_only() -> None:
    """Keeps a core busy and lets other threads run."""
    end = time.perf_counter() + _CONTROL_S
    while time.perf_counter() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", _ROUNDS_OF_HASH)


def hold_interpreter() -> None:
    """Lets no other Python thread run: a call into C that keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(round(_CONTROL_S * 1e6))


def _prepare_runs(session: Any, sample: str | None) -> Callable[[], object] | None:
    if sample is None:
        return None
    feeds = read_tensors(Path(sample))
    return lambda: run_session(session, feeds)


def _repeat(observe: Callable[[], Call]) -> list[Call]:
    """Observes a few times; once is enough of what takes long, since nothing is as clear."""
    calls: list[Call] = []
    started = time.perf_counter()
    while len(calls) < _REPEATS and time.perf_counter() - started < _ENOUGH_S:
        calls.append(observe())
    return calls


def _watch_creation(ticker: Ticker, plan: SessionPlan) -> Calls:
    phases: Calls = {"load": [], "initialise": []}

    def both() -> Call:
        loaded, session = ticker.observe(lambda: _load(plan))
        initialised, _ = ticker.observe(lambda: _initialise(session, plan))
        _check_provider(session, plan)
        phases["load"].append(loaded)
        phases["initialise"].append(initialised)
        return initialised

    try:
        _repeat(both)
    except (AttributeError, TypeError):
        # The two steps are not part of ONNX Runtime's interface: a version may have them otherwise.
        return {"create": _repeat(lambda: ticker.observe(lambda: build_session(plan))[0])}
    return phases


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


def _check_provider(session: Any, plan: SessionPlan) -> None:
    if plan.providers[0].name not in session.get_providers():
        raise ProviderError(f"session did not get {plan.providers[0].name}: {plan.model}")
