"""The check `parallel`: N sessions one after another, in threads and in processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.diagnose.diagnosis import Diagnosis, diagnose
from pipeline.diagnose.parallel.isolation import isolate
from pipeline.diagnose.parallel.processes import Answers, run_together
from pipeline.diagnose.parallel.verdict import (
    WAYS,
    Made,
    Race,
    Way,
    efficiency,
    explain_nothing,
    find_in,
    speed_up,
    tabulate,
)
from pipeline.diagnose.subject import Subject, plan_of
from pipeline.errors import PipelineError
from pipeline.measuring.comparison import LEAST_ROUNDS
from pipeline.measuring.device_lock import CPU_DEVICE, measuring
from pipeline.measuring.rounds import order_of_round
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.session import SessionPlan

_MOST_ON_CPU = 4
_MOST_ROUNDS = 7
_ENOUGH_S = 7.0
"""No further round begins after so long, once there are as many as say anything."""


def diagnose_parallel(subject: Subject, *, devices: Sequence[str], sessions: int | None = None) -> Diagnosis:
    """Makes several sessions of a model in three ways, in fresh processes, in interleaved rounds.

    Args:
        subject: The model; a source goes before its bundle.
        devices: `cpu`, `cuda:0`, …: sessions are put on them in turn.
        sessions: How many; None for one per GPU, or on the CPU one per core, from two to four.

    Returns:
        Also where a way, or every way, fails: that is a finding.

    Raises:
        LoadError: There is no source, and no variant of the bundle runs on a device.
        BundleError: The bundle cannot be read.
    """
    cores = read_hardware().cores
    count = count_sessions(devices, cores) if sessions is None else sessions
    plans = [plan_of(subject, devices[index % len(devices)]) for index in range(count)]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with measuring(devices[0]):
        try:
            race = _run_race(plans, devices, lanes=count_lanes(devices, cores))
        except PipelineError as error:
            return diagnose("parallel", [explain_nothing(error.message, error.hint)], subject=subject.name)
    return diagnose(
        "parallel",
        find_in(race),
        subject=subject.name,
        tables=[tabulate(race)] if race.rounds else [],
        figures=_figures(race),
    )


def count_sessions(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions to try: one per GPU, or on the CPU one per core; two to four there."""
    if list(devices) == [CPU_DEVICE]:
        return min(_MOST_ON_CPU, max(2, cores))
    return max(2, len(devices))


def count_lanes(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions can be made at once at best."""
    return cores if list(devices) == [CPU_DEVICE] else len(set(devices))


def _run_race(plans: Sequence[SessionPlan], devices: Sequence[str], *, lanes: int) -> Race:
    # One that does not count: it brings the file into memory, and says soon what cannot be loaded at all.
    _, version = measure_way("sequential", plans[:1])
    rounds: dict[Way, list[Made]] = {way: [] for way in WAYS}
    failures: dict[Way, str] = {}
    begun = time.monotonic()
    for index in range(_MOST_ROUNDS):
        if index >= LEAST_ROUNDS and time.monotonic() - begun > _ENOUGH_S:
            break
        for way in order_of_round(WAYS, index):
            if way in failures:
                continue
            try:
                rounds[way].append(measure_way(way, plans)[0])
            except PipelineError as error:
                failures[way] = error.message
    complete = {way: tuple(made) for way, made in rounds.items() if way not in failures}
    return Race(len(plans), tuple(devices), lanes, version, complete, failures)


def measure_way(way: Way, plans: Sequence[SessionPlan]) -> tuple[Made, str]:
    """Makes the sessions once, in fresh processes; returns what it took and ONNX Runtime's version.

    Raises:
        PipelineError: A session could not be made, or a process died.
    """
    # Each sees its own GPU alone, as a pool's worker does.
    apart = [isolate(plan) for plan in plans] if way == "processes" else []
    shares = [[plan] for plan, _ in apart] or [list(plans)]
    answers = run_together(
        "pipeline.diagnose.parallel.making:make_sessions",
        [{"plans": [encode(plan) for plan in share], "in_threads": way == "threads"} for share in shares],
        participants=len(shares),
        environments=[environment for _, environment in apart] or None,
    )
    return read_answers(answers), answers.values[0]["onnxruntime"]


def read_answers(answers: Answers) -> Made:
    """Returns what processes took for their sessions, in milliseconds. Pure."""
    of_each = answers.values
    return Made(
        ready_ms=(max(max(each["ready_s"]) for each in of_each) - answers.started_s) * 1e3,
        start_ms=(max(each["imported_s"] for each in of_each) - answers.started_s) * 1e3,
        creating_ms=max(max(each["ready_s"]) - min(each["begun_s"]) for each in of_each) * 1e3,
        session_ms=tuple(
            (ready_s - begun_s) * 1e3
            for each in of_each
            for begun_s, ready_s in zip(each["begun_s"], each["ready_s"], strict=True)
        ),
        private_mb=sum(each["private_mb"] for each in of_each),
    )


def _figures(race: Race) -> dict[str, Any]:
    return {
        "onnxruntime": race.onnxruntime,
        "sessions": race.sessions,
        "devices": list(race.devices),
        "lanes": race.lanes,
        "ways": {
            way: {
                "rounds": [asdict(made) | {"session_ms": list(made.session_ms)} for made in rounds],
                "speed_up": speed_up(race, way, "ready_ms"),
                "efficiency": efficiency(race, way, "ready_ms"),
                "speed_up_of_creating": speed_up(race, way, "creating_ms"),
                "efficiency_of_creating": efficiency(race, way, "creating_ms"),
            }
            for way, rounds in race.rounds.items()
        },
        "failures": dict(race.failures),
    }
