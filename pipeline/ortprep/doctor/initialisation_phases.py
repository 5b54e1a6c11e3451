"""Phases of an initialisation: makes a session with everything logged, and splits its time by the log.

Every line that is understood closes the time since the one before it, and says what that time was spent on;
time before lines that are not understood goes to the next that is. So the phases add up to the whole,
whatever a version logs. The messages relied on are in 1.23 to 1.31 (recorded logs are among the tests);
versions up to 1.27 do not announce a transformer, only log when it is done.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.bytecode import Bytecode, read_bytecode
from ortprep.children.child import read_own_output, run_child
from ortprep.doctor.doctor_model import CHILD_TIMEOUT_S
from ortprep.versions import parse_version

PhaseName: TypeAlias = str

TITLES: dict[PhaseName, str] = {
    "enter": "options, thread pools, libraries loaded ahead",
    "parse": "parse the model file",
    "provider": "execution provider: its library, device context",
    "register": "kernel registries, session state",
    "inline": "inline functions",
    "weights_out": "copy weights out of the parsed file",
    "optimise": "graph transformers",
    "assign": "assign nodes to providers",
    "plan": "plan execution and memory",
    "weights_in": "weights to the device",
    "kernels": "make kernels, prepack weights",
    "finish": "finish",
}
"""Every phase in order, and how it is shown."""

_TRANSFORMED = re.compile(r"GraphTransformer (\S+) modified: \d")
_ANNOUNCED = re.compile(r"Applying graph transformer (\S+) on step")
_LOOPS = "Running graph optimizations in loop"
_CLOSING: tuple[tuple[re.Pattern[str], PhaseName], ...] = (
    # Said at the same place whether or not there are functions; without, other work was done until then.
    (re.compile(r"does not have any local functions"), "register"),
    (re.compile(r"AOT inlin", re.IGNORECASE), "inline"),
    (re.compile(_LOOPS), "assign"),
    (re.compile(r"Applying \d+ graph transformer|Graph transformer step|No graph transformers"), "optimise"),
    (re.compile(r"Node placements"), "assign"),
    (re.compile(r"Saving initialized tensors"), "plan"),
    (re.compile(r"Done saving initialized tensors"), "weights_in"),
    (re.compile(r"Session successfully initialized"), "kernels"),
)
_BEGINS = "Initializing session"
# From 1.24 on ONNX Runtime takes the weights out of the parsed file before its first transformer; before, it
# did so between the first level and the others, together with assigning nodes (seen on logs of 1.23.2 to
# 1.31.1: the time grows with the weights, and is gone where they are mapped).
_EARLY_WEIGHTS = (1, 24)

_LINE = re.compile(
    r"(?:\x1b\[[0-9;]*m)?"
    r"(?P<second>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(?P<fraction>\d{1,9}) "
    r"\[[A-Z]:[^,\]]*, [^\s:\]]+:\d+ [^\]]*\] (?P<message>.*)"
)
_QUARTER_NS = 15 * 60 * 10**9
_MAX_LOG_BYTES = 256 * 2**20
_LOADED = "model_loading"


@dataclass(frozen=True)
class LogLine:
    """A line of the log.

    Attributes:
        at_ns: Time at which it was written, in ns since 1970, by the clock that the log shows.
        message: First line of its message.
    """

    at_ns: int
    message: str


@dataclass(frozen=True)
class Timeline:
    """Notes of the process that made the session; nanoseconds since 1970.

    Attributes:
        begin_ns: Time just before the session was requested.
        loaded_ns: Time at which the model was parsed, by ONNX Runtime's profile; None if unknown.
        end_ns: Time at which the session was ready.
        onnxruntime: Version of ONNX Runtime.
    """

    begin_ns: int
    loaded_ns: int | None
    end_ns: int
    onnxruntime: str


@dataclass(frozen=True)
class Trace:
    """Times of one process, in milliseconds.

    Attributes:
        numpy_ms: Time to import numpy.
        onnxruntime_ms: Time to import ONNX Runtime.
        phases: Phases of making the session.
        onnxruntime: Version of ONNX Runtime.
        bytecode: What of the imports was compiled.
    """

    numpy_ms: float
    onnxruntime_ms: float
    phases: Mapping[PhaseName, float]
    onnxruntime: str
    bytecode: Bytecode

    @property
    def init_ms(self) -> float:
        """Making the session."""
        return sum(self.phases.values())


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
    from ortprep.runtime.loading.session import build_session  # only now, since it imports numpy

    # The child's folder for temporary files goes with it.
    options, prefix = plan.session_options, str(Path(tempfile.gettempdir()) / "profile")
    logging: dict[str, int | bool | str] = {"enable_profiling": True, "profile_file_prefix": prefix}
    attributes = {**options.attributes, **logging, "log_severity_level": 0}
    begin_ns = time.time_ns()
    session = build_session(plan._replace(session_options=options._replace(attributes=attributes)))
    end_ns = time.time_ns()
    loaded_us = read_loaded_us(Path(session.end_profiling()).read_bytes())
    start_ns = session.get_profiling_start_time_ns()
    loaded_ns = None if loaded_us is None else start_ns + int(loaded_us * 1000)
    timeline = Timeline(begin_ns, loaded_ns, end_ns, onnxruntime.__version__)
    lines = parse_log(read_own_output(_MAX_LOG_BYTES), begin_ns=begin_ns)
    return Trace(
        numpy_ms=(times[1] - times[0]) * 1e3,
        onnxruntime_ms=(times[2] - times[1]) * 1e3,
        phases=split_phases(lines, timeline),
        onnxruntime=onnxruntime.__version__,
        bytecode=read_bytecode(),
    )


def read_loaded_us(profile: bytes) -> float | None:
    """Returns when the model was parsed, in µs since a profile began; None if it does not say.

    Names in a profile may be no UTF-8, or have control characters.
    """
    events = json.loads(profile.decode("utf-8", errors="replace"), strict=False)
    ends = (one["ts"] + one["dur"] for one in events if str(one.get("name")).startswith(_LOADED))
    return next(ends, None)


def parse_log(text: str, *, begin_ns: int) -> tuple[LogLine, ...]:
    """Returns the lines of a log, its clock set right; what is no line of ONNX Runtime's is left out.

    ONNX Runtime writes the local time without saying which it is. Zones differ by quarters of an hour, so the
    first line, which is written within minutes of `begin_ns`, shows the zone.

    Args:
        text: ONNX Runtime's output to stderr, with colours.
        begin_ns: Time at which the session was requested, in ns since 1970, UTC.
    """
    matches = [match for match in map(_LINE.match, text.splitlines()) if match is not None]
    lines = [(at_ns, match["message"]) for match in matches if (at_ns := _read_time(match)) is not None]
    zone_ns = round((lines[0][0] - begin_ns) / _QUARTER_NS) * _QUARTER_NS if lines else 0
    return tuple(LogLine(at_ns - zone_ns, message) for at_ns, message in lines)


def _read_time(line: re.Match[str]) -> int | None:
    """Returns the time of a line, None for no time: the text may be a name in a model."""
    try:
        second = datetime.fromisoformat(line["second"]).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(second.timestamp()) * 10**9 + int(line["fraction"].ljust(9, "0"))


def split_phases(lines: Sequence[LogLine], timeline: Timeline) -> dict[PhaseName, float]:
    """Returns the time of each phase in ms, in order, without those that took none; together the whole."""
    totals_ns, at_ns = dict.fromkeys(TITLES, 0), timeline.begin_ns
    inner = [line for line in lines if timeline.begin_ns <= line.at_ns <= timeline.end_ns]
    for name, closed_ns in (*_find_ends(inner, timeline), ("finish", timeline.end_ns)):
        totals_ns[name] += closed_ns - at_ns
        at_ns = closed_ns
    return {name: ns / 1e6 for name, ns in totals_ns.items() if ns > 0}


def _find_ends(lines: Sequence[LogLine], timeline: Timeline) -> Iterator[tuple[PhaseName, int]]:
    """Yields what each line that is understood ends, and when; nothing without a usable log."""
    start = next((i for i, line in enumerate(lines) if line.message.startswith(_BEGINS)), None)
    if start is None:
        return
    # Before the initialisation proper the log has next to nothing.
    first_ns, start_ns = lines[0].at_ns, lines[start].at_ns
    loaded_ns = start_ns if timeline.loaded_ns is None else timeline.loaded_ns
    yield "enter", first_ns
    yield "parse", min(max(loaded_ns, first_ns), start_ns)
    yield "provider", start_ns
    numbers = parse_version(timeline.onnxruntime)
    takes_weights_early = numbers is None or numbers[:2] >= _EARLY_WEIGHTS
    announced, transformed = "", False
    for line in lines[start + 1 :]:
        if found := _TRANSFORMED.match(line.message):
            is_of_weights = takes_weights_early and not transformed and announced != found[1]
            yield "weights_out" if is_of_weights else "optimise", line.at_ns
            transformed = True
        elif found := _ANNOUNCED.match(line.message):
            announced = found[1]
            yield "optimise", line.at_ns
        elif not takes_weights_early and line.message.startswith(_LOOPS):
            yield "weights_out", line.at_ns
        elif name := next((name for pattern, name in _CLOSING if pattern.search(line.message)), None):
            yield name, line.at_ns
