"""The check `concurrent`: several models at once, in threads and in processes: each as fast as alone?

A run lets go of the interpreter; only handing arrays over holds it. So what threads lose against processes is
in the driver, the allocator and other locks of a process, and in Python where a model takes microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.concurrent_models.model_runs import run_models
from ortprep.doctor.concurrent_models.verdict import (
    SITUATIONS,
    Contention,
    ModelRuns,
    PlacedModel,
    Situation,
    find_in,
    tabulate,
)
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of, with_threads
from ortprep.doctor.interleaved_runs import MAX_COMPARISON_S
from ortprep.doctor.process_group import run_together
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import run_interleaved
from ortprep.runtime.machine.hardware import read_hardware

Load = tuple[SessionPlan, str]
"""Plan of a session, and the sample it is run on."""


def diagnose_concurrent(
    subjects: Sequence[DoctorModel], *, devices: Sequence[str], seconds: float = 1.5
) -> Diagnosis:
    """Runs models alone, at once in threads, and at once in processes, in interleaved rounds.

    Args:
        subjects: At least one; a single one is run twice at once. A source goes before its bundle.
        devices: `cpu`, `cuda:0`, …: models are put on them in turn.
        seconds: How long each situation is measured, all rounds together.

    Returns:
        Also where a situation fails: that is a finding.

    Raises:
        LoadError: A model cannot be run alone; or a subject has no source, and no variant of its bundle
            runs on its device.
        BundleError: A bundle cannot be read.
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    subjects = subjects if len(subjects) > 1 else [*subjects] * 2
    models = place_models([subject.name for subject in subjects], devices, cores=read_hardware().cores)
    loads = [(_plan(subject, model), subject.sample) for subject, model in zip(subjects, models, strict=True)]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with guard_device(devices[0]):
        contention = _measure(models, loads, window_s=seconds / MIN_ROUNDS)
    return diagnose(
        "concurrent",
        find_in(contention),
        subject=", ".join(dict.fromkeys(subject.name for subject in subjects)),
        tables=[tabulate(contention)] if contention.situations.rounds else [],
        figures=encode(contention),
    )


def place_models(names: Sequence[str], devices: Sequence[str], *, cores: int) -> tuple[PlacedModel, ...]:
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
        PlacedModel(name, device, threads if device == CPU_DEVICE else None)
        for name, device in zip(numbered, placed, strict=True)
    )


def _plan(subject: DoctorModel, model: PlacedModel) -> SessionPlan:
    plan = plan_of(subject, model.device)
    return plan if model.threads is None else with_threads(plan, model.threads)


def _measure(models: tuple[PlacedModel, ...], loads: Sequence[Load], *, window_s: float) -> Contention:
    # These runs do not count: they say soon whether the models can be run, and how long loading takes.
    begun_s = time.monotonic()
    version, _ = _measure_situation("alone", loads, window_s=0.0)
    of_each_s = (time.monotonic() - begun_s) / len(_different(loads))
    situations = run_interleaved(
        SITUATIONS,
        lambda situation: _measure_situation(situation, loads, window_s=window_s)[1],
        estimate_s=len(SITUATIONS) * len(loads) * of_each_s,
        max_comparison_s=MAX_COMPARISON_S,
    )
    return Contention(models, version, situations)


def _measure_situation(
    situation: Situation, loads: Sequence[Load], *, window_s: float
) -> tuple[str, tuple[ModelRuns, ...]]:
    """Runs all models in fresh processes; returns ONNX Runtime's version, and the runs of each model.

    Raises:
        PipelineError: A session could not be made or did not run, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    match situation:
        case "threads":
            return _run([loads], window_s)
        case "processes":
            return _run([[load] for load in loads], window_s)
        case "alone":
            alone = {name: _run([[load]], window_s) for name, load in _different(loads).items()}
            version = next(iter(alone.values()))[0]
            return version, tuple(alone[str(load)][1][0] for load in loads)


def _different(loads: Sequence[Load]) -> dict[str, Load]:
    """Copies of a model on one device are alike when alone: once is enough."""
    return {str(load): load for load in loads}


def _run(shares: Sequence[Sequence[Load]], window_s: float) -> tuple[str, tuple[ModelRuns, ...]]:
    """Runs models at once, in a process for each share of them."""
    requests = [
        {
            "plans": [plan for plan, _ in share],
            "samples": [sample for _, sample in share],
            "window_s": window_s,
        }
        for share in shares
    ]
    replies = run_together(run_models, requests, participants=sum(map(len, shares)))
    models = [model for value in replies.values for model in value["models"]]
    return replies.values[0]["onnxruntime"], decode(tuple[ModelRuns, ...], models)
