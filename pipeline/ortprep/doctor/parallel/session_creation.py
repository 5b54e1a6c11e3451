"""The process that makes one or more sessions, one after another or in a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.process_group import join, results_of
from ortprep.runtime.loading.session import build_session, import_onnxruntime
from ortprep.runtime.machine.process_memory import private_bytes

_MB = 2**20


@dataclass(frozen=True)
class CreationTimes:
    """When one process made its sessions; times are `time.monotonic()`, one clock for all processes.

    Attributes:
        onnxruntime: Version.
        imported_s: End of the import of ONNX Runtime.
        begun_s: Start of each session's creation.
        ready_s: End of each session's creation.
        private_mb: Anonymous memory with all sessions there.
    """

    onnxruntime: str
    imported_s: float
    begun_s: tuple[float, ...]
    ready_s: tuple[float, ...]
    private_mb: float


def make_sessions(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes sessions and keeps them until all other processes have theirs.

    Args:
        request: `plans`; `in_threads`, whether all are made at once; a process is one participant of the
            barrier.

    Returns:
        Fields of `CreationTimes`.

    Raises:
        LoadError: A session cannot be made.
        ChildError: Another process failed.
    """
    barrier = join(request)
    onnxruntime = import_onnxruntime()
    imported_s = time.monotonic()
    plans = decode(tuple[SessionPlan, ...], request["plans"])
    if request["in_threads"]:
        start = threading.Barrier(len(plans))
        with ThreadPoolExecutor(len(plans)) as threads:
            made = results_of([threads.submit(_make, plan, start) for plan in plans])
    else:
        made = [_make(plan) for plan in plans]
    # Otherwise the last figures would include memory that others give back, and their exit.
    barrier.wait("ready")
    begun_s, ready_s, _ = zip(*made, strict=True)
    memory_mb = private_bytes() / _MB
    return dict(encode(CreationTimes(onnxruntime.__version__, imported_s, begun_s, ready_s, memory_mb)))


def _make(plan: SessionPlan, start: threading.Barrier | None = None) -> tuple[float, float, Any]:
    if start is not None:
        start.wait()
    begun_s = time.monotonic()
    session = build_session(plan, take_turns=False)
    return begun_s, time.monotonic(), session
