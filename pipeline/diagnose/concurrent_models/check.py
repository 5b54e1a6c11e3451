"""The check `concurrent`: several models at once, in threads and in processes: each as fast as alone?

A run lets go of the interpreter; only handing arrays over holds it. So what threads lose against processes is
in the driver, the allocator and other locks of a process, and in Python where a model takes microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.bundle.session_record import SessionPlan
from pipeline.diagnose.alone import alone_on
from pipeline.diagnose.concurrent_models.verdict import (
    SITUATIONS,
    Contention,
    Model,
    Ran,
    Situation,
    find_in,
    slow_down,
    tabulate,
)
from pipeline.diagnose.diagnosis import Diagnosis, diagnose
from pipeline.diagnose.parallel.isolation import isolate
from pipeline.diagnose.parallel.processes import Answers, run_together
from pipeline.diagnose.subject import Subject, plan_of
from pipeline.diagnose.turns import take_turns
from pipeline.errors import PipelineError
from pipeline.measuring.comparison import LEAST_ROUNDS
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.runtime.hardware import read_hardware

_FUNCTION = "pipeline.diagnose.concurrent_models.running:run_models"

Load = tuple[SessionPlan, str]
"""How a session is made, and the sample it is run on."""


def diagnose_concurrent(
    subjects: Sequence[Subject], *, devices: Sequence[str], seconds: float = 1.5
) -> Diagnosis:
    """Runs models alone, at once in threads, and at once in processes, in interleaved rounds.

    Args:
        subjects: At least one; a single one is run twice at once. A source goes before its bundle.
        devices: `cpu`, `cuda:0`, …: models are put on them in turn.
        seconds: How long each situation is measured, all rounds together.

    Returns:
        Also where a situation, or every one, fails: that is a finding.

    Raises:
        LoadError: A subject has no source, and no variant of its bundle runs on its device.
        BundleError: A bundle cannot be read.
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    those = list(subjects) if len(subjects) > 1 else [*subjects] * 2
    models = place_models([subject.name for subject in those], devices, cores=read_hardware().cores)
    loads = [(_plan(subject, model), subject.sample) for subject, model in zip(those, models, strict=True)]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with alone_on(devices[0]):
        contention = _measure(models, loads, window_s=seconds / LEAST_ROUNDS)
    return diagnose(
        "concurrent",
        find_in(contention),
        subject=", ".join(subject.name for subject in subjects),
        tables=[tabulate(contention)] if contention.rounds else [],
        figures=_figures(contention),
    )


def place_models(names: Sequence[str], devices: Sequence[str], *, cores: int) -> tuple[Model, ...]:
    """Puts models on devices in turn, and divides the cores between those on the CPU. Pure.

    Args:
        names: Of the models; what occurs twice is numbered.
        devices: At least one.
        cores: Of the CPU.
    """
    placed = [devices[index % len(devices)] for index in range(len(names))]
    threads = max(1, cores // max(1, placed.count(CPU_DEVICE)))
    numbered = [
        name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
    return tuple(
        Model(name, device, threads if device == CPU_DEVICE else None)
        for name, device in zip(numbered, placed, strict=True)
    )


def _plan(subject: Subject, model: Model) -> SessionPlan:
    plan = plan_of(subject, model.device)
    if model.threads is None:
        return plan
    attributes = {**plan.session_options.attributes, "intra_op_num_threads": model.threads}
    return plan._replace(session_options=plan.session_options._replace(attributes=attributes))


def _measure(models: tuple[Model, ...], loads: Sequence[Load], *, window_s: float) -> Contention:
    # Runs that do not count: they say soon what cannot be run at all, and how long it takes to load it all.
    begun_s = time.monotonic()
    try:
        _, version = measure_situation("alone", loads, window_s=0.0)
    except PipelineError as error:
        return Contention(models, "", {}, {"alone": error.message}, 0.0)
    of_each_s = (time.monotonic() - begun_s) / len(_different(loads))
    turns = take_turns(
        SITUATIONS,
        lambda situation: measure_situation(situation, loads, window_s=window_s)[0],
        estimate_s=len(SITUATIONS) * len(loads) * of_each_s,
    )
    return Contention(models, version, turns.rounds, turns.failures, turns.round_s)


def measure_situation(
    situation: Situation, loads: Sequence[Load], *, window_s: float
) -> tuple[tuple[Ran, ...], str]:
    """Runs all models once in fresh processes; returns what each did, and ONNX Runtime's version.

    Raises:
        PipelineError: A session could not be made or did not run, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    if situation == "threads":
        return _run_in_one(loads, window_s)
    if situation == "processes":
        return _run_in_each(loads, window_s)
    alone = {name: _run_in_each([load], window_s) for name, load in _different(loads).items()}
    ran = tuple(alone[str(load)][0][0] for load in loads)
    return ran, alone[str(loads[0])][1]


def _different(loads: Sequence[Load]) -> dict[str, Load]:
    """Copies of a model on one device are alike when alone: once is enough."""
    return {str(load): load for load in loads}


def _run_in_one(loads: Sequence[Load], window_s: float) -> tuple[tuple[Ran, ...], str]:
    answers = run_together(_FUNCTION, [_request(loads, window_s)], participants=len(loads))
    return _read_answers(answers)


def _run_in_each(loads: Sequence[Load], window_s: float) -> tuple[tuple[Ran, ...], str]:
    # Each sees its own GPU alone, as a pool's worker does.
    apart = [(isolate(plan), sample) for plan, sample in loads]
    answers = run_together(
        _FUNCTION,
        [_request([(plan, sample)], window_s) for (plan, _), sample in apart],
        participants=len(loads),
        environments=[environment for (_, environment), _ in apart],
    )
    return _read_answers(answers)


def _request(loads: Sequence[Load], window_s: float) -> dict[str, Any]:
    return {
        "plans": [encode(plan) for plan, _ in loads],
        "samples": [sample for _, sample in loads],
        "window_s": window_s,
    }


def _read_answers(answers: Answers) -> tuple[tuple[Ran, ...], str]:
    models = (model for answer in answers.values for model in answer["models"])
    ran = tuple(Ran(tuple(model["run_ms"]), model["cpu_share"]) for model in models)
    return ran, answers.values[0]["onnxruntime"]


def _figures(contention: Contention) -> dict[str, Any]:
    def of_model(index: int) -> dict[str, Any]:
        return {
            **asdict(contention.models[index]),
            "rounds": {
                situation: [
                    {"run_ms": list(models[index].run_ms), "cpu_share": models[index].cpu_share}
                    for models in rounds
                ]
                for situation, rounds in contention.rounds.items()
            },
            "slow_down": {way: slow_down(contention, index, way) for way in SITUATIONS if way != "alone"},
        }

    return {
        "onnxruntime": contention.onnxruntime,
        "models": [of_model(index) for index in range(len(contention.models))],
        "failures": dict(contention.failures),
        "round_s": contention.round_s,
    }
