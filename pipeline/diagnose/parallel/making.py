"""What a process does that makes one or more sessions: one after another, or a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.bundle.codec import decode
from pipeline.bundle.session_record import SessionPlan
from pipeline.diagnose.parallel.barrier import values_of
from pipeline.diagnose.parallel.processes import join
from pipeline.runtime.loading.session import build_session, import_onnxruntime
from pipeline.runtime.memory import private_bytes

_MB = 2**20


def make_sessions(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes sessions and keeps them until all other processes have theirs.

    Times are `time.monotonic()`, in seconds: one clock for all processes of the machine.

    Args:
        request: `plans`; `in_threads`, whether all are made at once; `begin_together`, whether to wait until
            all other processes have imported ONNX Runtime too; `barrier` and `participants`, as
            `run_together` adds them, a process being one participant.

    Returns:
        `onnxruntime`, the version; `imported_s`, when it had been imported; `begun_s` and `ready_s` per
        session; `private_mb`, anonymous memory with all sessions made.

    Raises:
        LoadError: A session cannot be made.
        ChildError: Another process failed.
    """
    barrier = join(request)
    onnxruntime = import_onnxruntime()
    imported_s = time.monotonic()
    plans = [decode(SessionPlan, plan) for plan in request["plans"]]
    if request["begin_together"]:
        barrier.wait("imported")
    made = _make_in_threads(plans) if request["in_threads"] else [_make(plan) for plan in plans]
    # Memory that others give back, and their end, would otherwise be in the figures of who comes last.
    barrier.wait("ready")
    return {
        "onnxruntime": onnxruntime.__version__,
        "imported_s": imported_s,
        "begun_s": [begun_s for begun_s, _, _ in made],
        "ready_s": [ready_s for _, ready_s, _ in made],
        "private_mb": private_bytes() / _MB,
    }


def _make(plan: SessionPlan) -> tuple[float, float, Any]:
    begun_s = time.monotonic()
    session = build_session(plan, take_turns=False)
    return begun_s, time.monotonic(), session


def _make_in_threads(plans: Sequence[SessionPlan]) -> list[tuple[float, float, Any]]:
    start = threading.Barrier(len(plans))

    def make(plan: SessionPlan) -> tuple[float, float, Any]:
        start.wait()
        return _make(plan)

    with ThreadPoolExecutor(len(plans)) as threads:
        return values_of([threads.submit(make, plan) for plan in plans])
