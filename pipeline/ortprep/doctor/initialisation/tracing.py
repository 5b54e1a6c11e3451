"""Makes a session in a fresh process with everything logged, and splits its time into phases."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.doctor.doctor_model import CHILD_TIMEOUT_S
from ortprep.doctor.initialisation.phases import Initialisation, Timeline, parse_log, split_phases
from ortprep.doctor.output_capture import output_to, read_start
from ortprep.doctor.profiling import profiled, read_events

_MAX_LOG_BYTES = 256 * 2**20
_LOADED = "model_loading"


@dataclass(frozen=True)
class Trace:
    """Times of one process, in milliseconds.

    Attributes:
        numpy_ms: Time to import numpy.
        onnxruntime_ms: Time to import ONNX Runtime.
        initialisation: Phases of making the session.
        onnxruntime: Version of ONNX Runtime.
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
    return run_child(trace, plan, timeout_s=CHILD_TIMEOUT_S).value


def trace(plan: SessionPlan) -> Trace:
    """Makes the session, and reads from its log what it did; runs in a child.

    Raises:
        LoadError: The session could not be made.
    """
    times = [time.perf_counter()]
    import numpy  # noqa: F401 - timed

    times.append(time.perf_counter())
    import onnxruntime

    times.append(time.perf_counter())
    from ortprep.runtime.loading.session import build_session

    # The child's folder for temporary files goes with it.
    folder = Path(tempfile.gettempdir())
    logged = profiled(plan, folder / "profile", log_severity_level=0)
    with output_to(folder / "log"):
        begin_ns = time.time_ns()
        session = build_session(logged)
        end_ns = time.time_ns()
        profile = session.end_profiling()
    events = read_events(Path(profile))
    start_ns = session.get_profiling_start_time_ns()
    loaded = next((event for event in events.session if event.name.startswith(_LOADED)), None)
    loaded_ns = None if loaded is None else start_ns + int((loaded.start_us + loaded.us) * 1000)
    timeline = Timeline(begin_ns, loaded_ns, end_ns, onnxruntime.__version__)
    lines = parse_log(read_start(folder / "log", _MAX_LOG_BYTES), begin_ns=begin_ns)
    return Trace(
        numpy_ms=(times[1] - times[0]) * 1e3,
        onnxruntime_ms=(times[2] - times[1]) * 1e3,
        initialisation=split_phases(lines, timeline),
        onnxruntime=onnxruntime.__version__,
    )
