"""Runs a model with ONNX Runtime's profiler on, in a fresh process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.profiling.trace_events import read_events
from ortprep.doctor.profiling.verdict import Profile, summarise_profile

if TYPE_CHECKING:
    import onnxruntime

_TIMEOUT_S = 6 * 3600.0
_MIN_RUNS, _MAX_RUNS, _BUDGET_S = 4, 50, 2.0
_ASSIGNMENT = {"session.record_ep_graph_assignment_info": "1"}


def profile_plan(plan: SessionPlan, sample: str, *, trace: Path | None = None) -> Profile:
    """Profiles one plan in one fresh process; the caller holds the device's lock.

    Args:
        plan: How the session is made.
        sample: `.npz` file with one array per input.
        trace: Where the trace is kept, in the format of Chrome's tracing, which Perfetto opens.

    Raises:
        LoadError: The session could not be made or run.
        ChildError: The process died.
        OSError: The trace cannot be written.
    """
    with scratch_folder("ortprep-profile-") as folder:
        request = {"plan": encode(plan), "sample": sample, "folder": str(folder)}
        answer = run_child(record, request, timeout_s=_TIMEOUT_S).value
        if trace is not None:
            # Beside it first, so that what was there before is replaced by a whole trace or not at all.
            unfinished = trace.with_name(f".tmp-{trace.name}")
            shutil.copyfile(answer["file"], unfinished)
            unfinished.replace(trace)
    return decode(Profile, answer["profile"])


def record(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a model with the profiler on; runs in a child.

    Returns:
        `profile`, and `file`, the trace.

    Raises:
        LoadError: The session could not be made or run.
    """
    from ortprep.runtime.loading.binding import run_first
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.tensors.arrays import read_tensors, run_session

    plan = _profiled(decode(SessionPlan, request["plan"]), Path(request["folder"]))
    session = build_session(plan)
    feeds = read_tensors(Path(request["sample"]))
    end, runs = time.monotonic() + _BUDGET_S, 0
    while runs < _MIN_RUNS or (runs < _MAX_RUNS and time.monotonic() < end):
        run_first(lambda: run_session(session, feeds), feeds, plan.model)
        runs += 1
    file = session.end_profiling()
    events = read_events(Path(file))
    profile = summarise_profile(events, assigned=_assigned(session))
    return {"profile": encode(profile), "file": file}


def _profiled(plan: SessionPlan, folder: Path) -> SessionPlan:
    record = plan.session_options
    attributes = {
        **record.attributes,
        "enable_profiling": True,
        "profile_file_prefix": str(folder / "profile"),
    }
    # Versions before 1.25 do not know the entry, and ignore it.
    entries = {**record.config_entries, **_ASSIGNMENT}
    changed = record._replace(attributes=attributes, config_entries=entries)
    return plan._replace(session_options=changed)


def _assigned(session: onnxruntime.InferenceSession) -> dict[str, int]:
    """Returns how many nodes each provider was given, where ONNX Runtime lists it (1.25 and later)."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    counts: dict[str, int] = {}
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return counts
