"""Makes a session in a fresh process with everything logged, and splits its time into phases."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.initialisation.phases import Initialisation, Timeline, parse_log, split_phases
from ortprep.doctor.profiling.trace_events import read_events

_TIMEOUT_S = 6 * 3600.0
_MAX_LOG_BYTES = 256 * 2**20
_LOADED = "model_loading"


@dataclass(frozen=True)
class Trace:
    """Times of one process, in milliseconds.

    Attributes:
        numpy_ms: Importing numpy.
        onnxruntime_ms: Importing ONNX Runtime.
        initialisation: Making the session.
        onnxruntime: Version.
    """

    numpy_ms: float
    onnxruntime_ms: float
    initialisation: Initialisation
    onnxruntime: str

    @property
    def init_ms(self) -> float:
        """Making the session."""
        return self.initialisation.total_ms


def trace_plan(plan: SessionPlan) -> Trace:
    """Traces one plan in one fresh process; the caller holds the device's lock.

    Raises:
        LoadError: The session could not be made.
        ChildError: The process died.
        OSError: There is no room for the log.
    """
    with scratch_folder("ortprep-trace-") as folder:
        request = {"plan": encode(plan), "folder": str(folder)}
        notes = run_child(trace, request, timeout_s=_TIMEOUT_S).value
        text = _read_start(folder / "log")
        timeline = decode(Timeline, notes.pop("timeline"))
    lines = parse_log(text, begin_ns=timeline.begin_ns)
    return Trace(initialisation=split_phases(lines, timeline), onnxruntime=timeline.onnxruntime, **notes)


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the session, and logs what it does to `log` in `folder`; runs in a child.

    Raises:
        LoadError: The session could not be made.
    """
    times = [time.perf_counter()]
    import numpy  # noqa: F401 - timed

    times.append(time.perf_counter())
    import onnxruntime

    times.append(time.perf_counter())
    from ortprep.runtime.loading.session import build_session

    folder = Path(request["folder"])
    plan = _logged(decode(SessionPlan, request["plan"]), folder)
    with _errors_to(folder / "log"):
        begin_ns = time.time_ns()
        session = build_session(plan)
        end_ns = time.time_ns()
        profile = session.end_profiling()
    events = read_events(Path(profile))
    start_ns = session.get_profiling_start_time_ns()
    loaded = next((e for e in events.session if e.name.startswith(_LOADED)), None)
    loaded_ns = None if loaded is None else start_ns + int((loaded.start_us + loaded.us) * 1000)
    return {
        "numpy_ms": (times[1] - times[0]) * 1e3,
        "onnxruntime_ms": (times[2] - times[1]) * 1e3,
        "timeline": encode(Timeline(begin_ns, loaded_ns, end_ns, onnxruntime.__version__)),
    }


def _logged(plan: SessionPlan, folder: Path) -> SessionPlan:
    attributes = {
        **plan.session_options.attributes,
        "log_severity_level": 0,
        "enable_profiling": True,
        "profile_file_prefix": str(folder / "profile"),
    }
    return plan._replace(session_options=plan.session_options._replace(attributes=attributes))


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Sends what is written to stderr, by ONNX Runtime too, to a file."""
    stderr = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _read_start(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
