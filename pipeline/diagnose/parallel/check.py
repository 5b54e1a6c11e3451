"""The check `parallel`: N sessions one after another, in threads and in processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.bundle.session_record import SessionPlan
from pipeline.diagnose.alone import alone_on
from pipeline.diagnose.diagnosis import Diagnosis, diagnose
from pipeline.diagnose.environment.wheels import name_installed, read_wheels
from pipeline.diagnose.parallel.isolation import isolate
from pipeline.diagnose.parallel.processes import Answers, run_together
from pipeline.diagnose.parallel.verdict import (
    WAYS,
    Made,
    ParallelRun,
    Way,
    efficiency,
    explain_nothing,
    find_in,
    speed_up,
    tabulate,
)
from pipeline.diagnose.subject import Subject, plan_of
from pipeline.diagnose.turns import take_turns
from pipeline.errors import PipelineError
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.runtime.hardware import read_hardware

_FUNCTION = "pipeline.diagnose.parallel.making:make_sessions"
_MOST_ON_CPU = 4
_MOST_ROUNDS = 7
_ENOUGH_S = 7.0
_RUNS_IN_ROUND = len(WAYS) + 1
"""Processes are started twice, once for the time from their start and once for that of creating."""


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
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    cores = read_hardware().cores
    count = count_sessions(devices, cores) if sessions is None else sessions
    plans = [plan_of(subject, devices[index % len(devices)]) for index in range(count)]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with alone_on(devices[0]):
        try:
            run = _measure(plans, devices, lanes=count_lanes(devices, cores))
        except PipelineError as error:
            return diagnose("parallel", [explain_nothing(error.message, error.hint)], subject=subject.name)
    return diagnose(
        "parallel",
        find_in(run),
        subject=subject.name,
        tables=[tabulate(run)] if run.rounds else [],
        figures=_figures(run),
    )


def count_sessions(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions to try: one per GPU, or on the CPU one per core; two to four there. Pure."""
    if list(devices) == [CPU_DEVICE]:
        return min(_MOST_ON_CPU, max(2, cores))
    return max(2, len(devices))


def count_lanes(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions can be made at once at best. Pure."""
    return cores if list(devices) == [CPU_DEVICE] else len(set(devices))


def _measure(plans: Sequence[SessionPlan], devices: Sequence[str], *, lanes: int) -> ParallelRun:
    # One that does not count: it brings the file into memory, and says soon what cannot be loaded at all, and
    # how long it would take to load it so many times.
    one = _run("sequential", plans[:1])
    turns = take_turns(
        WAYS,
        functools.partial(measure_way, plans=plans),
        estimate_s=_RUNS_IN_ROUND * len(plans) * read_answers(one).ready_ms / 1e3,
        most=_MOST_ROUNDS,
        enough_s=_ENOUGH_S,
    )
    return ParallelRun(
        sessions=len(plans),
        devices=tuple(devices),
        lanes=lanes,
        onnxruntime=one.values[0]["onnxruntime"],
        wheel=name_installed(read_wheels()),
        rounds=turns.rounds,
        failures=turns.failures,
        round_s=turns.round_s,
    )


def measure_way(way: Way, plans: Sequence[SessionPlan]) -> Made:
    """Makes the sessions in fresh processes; returns what it took.

    A process each is done twice: as it is, and with all of them waiting for each other once they have
    imported ONNX Runtime: left to themselves, late ones make theirs while others are done already, and the
    time of creating would be flattered.

    Raises:
        PipelineError: A session could not be made, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    made = read_answers(_run(way, plans))
    if way != "processes":
        return made
    together = read_answers(_run(way, plans, begin_together=True))
    return replace(made, creating_ms=together.creating_ms, session_ms=together.session_ms)


def _run(way: Way, plans: Sequence[SessionPlan], *, begin_together: bool = False) -> Answers:
    # Each sees its own GPU alone, as a pool's worker does.
    apart = [isolate(plan) for plan in plans] if way == "processes" else []
    shares = [[plan] for plan, _ in apart] or [list(plans)]
    return run_together(
        _FUNCTION,
        [
            {
                "plans": [encode(plan) for plan in share],
                "in_threads": way == "threads",
                "begin_together": begin_together,
            }
            for share in shares
        ],
        participants=len(shares),
        environments=[environment for _, environment in apart] or None,
    )


def read_answers(answers: Answers) -> Made:
    """Returns what processes took for their sessions, in milliseconds. Pure."""
    of_each: Sequence[Mapping[str, Any]] = answers.values
    begun_s = [begun_s for each in of_each for begun_s in each["begun_s"]]
    ready_s = [ready_s for each in of_each for ready_s in each["ready_s"]]
    return Made(
        ready_ms=(max(ready_s) - answers.started_s) * 1e3,
        start_ms=(max(each["imported_s"] for each in of_each) - answers.started_s) * 1e3,
        creating_ms=(max(ready_s) - min(begun_s)) * 1e3,
        session_ms=tuple((ready - begun) * 1e3 for begun, ready in zip(begun_s, ready_s, strict=True)),
        private_mb=sum(each["private_mb"] for each in of_each),
    )


def _figures(run: ParallelRun) -> dict[str, Any]:
    return {
        "onnxruntime": run.onnxruntime,
        "sessions": run.sessions,
        "devices": list(run.devices),
        "lanes": run.lanes,
        "round_s": run.round_s,
        "ways": {
            way: {
                "rounds": [asdict(made) | {"session_ms": list(made.session_ms)} for made in rounds],
                "speed_up": speed_up(run, way, "ready_ms"),
                "efficiency": efficiency(run, way, "ready_ms"),
                "speed_up_of_creating": speed_up(run, way, "creating_ms"),
                "efficiency_of_creating": efficiency(run, way, "creating_ms"),
            }
            for way, rounds in run.rounds.items()
        },
        "failures": dict(run.failures),
    }
