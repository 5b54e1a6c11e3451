"""`ortprep doctor`: where the time goes on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ortprep.bundle.codec import encode
from ortprep.children.child import scratch_folder
from ortprep.cli.command import ARTIFACTS, CONFIGS, Artifacts, AsJson, Configs, Devices, command
from ortprep.cli.console import echo, write_json, write_line, write_table
from ortprep.cli.model_resolution import Locations, examine_all
from ortprep.doctor.diagnosis import Diagnosis, Finding, conclude, exit_code_of
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.doctor.sampling import parse_shapes
from ortprep.errors import PipelineError, PoolError, SpecError


class Check(StrEnum):
    """What the doctor examines."""

    ENV = "env"
    INIT = "init"
    OPTIONS = "options"
    PARALLEL = "parallel"
    PROFILE = "profile"
    ALL = "all"


_WITHOUT_MODEL = (Check.ENV, Check.PARALLEL)
_USERS: dict[str, tuple[Check, ...]] = {
    "--rounds": (Check.INIT, Check.OPTIONS),
    "--trace": (Check.PROFILE,),
    "--expect": (Check.ENV,),
    "--shape": (Check.INIT, Check.OPTIONS, Check.PARALLEL, Check.PROFILE),
}
"""Options, and the checks that use them."""

_ROUNDS, _SUITE_ROUNDS = 5, 3

Shape = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=1,3,224,224", help="Shape of an input that the model leaves open."),
]


@dataclass(frozen=True)
class DoctorRequest:
    """What to examine, and how."""

    subjects: tuple[DoctorModel, ...]
    devices: tuple[str, ...]
    rounds: int
    artifacts: Path
    trace: Path | None
    expect: tuple[str, ...]


@command
def doctor(
    check: Annotated[
        Check | None,
        typer.Argument(metavar="CHECK", help=f"One of {', '.join(Check)}; by default env and parallel."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Names of specs, paths of bundles, or ONNX files."),
    ] = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    shape: Shape = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=99, help="Fresh processes per figure of init and options; 5 by default."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the trace of `profile`; by default MODEL.trace.json, or none for `all`.",
        ),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="Report a problem if this cannot be used: cuda."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Find out where the time of loading and running a model goes, and what would help."""
    checks = _choose_checks(check, models or [])
    _refuse_unused(checks, {"--rounds": rounds, "--trace": trace, "--expect": expect, "--shape": shape})
    _check_trace(trace)
    shapes = parse_shapes(shape or ())
    with _ended_properly(), scratch_folder("ortprep-doctor-") as folder:
        locations = Locations(folder, configs, artifacts)
        subjects = examine_all(models or (), locations, shapes=shapes)
        request = DoctorRequest(
            subjects=subjects,
            devices=_resolve(devices),
            rounds=rounds or (_SUITE_ROUNDS if check is Check.ALL else _ROUNDS),
            artifacts=artifacts,
            trace=_choose_trace(trace, subjects[0]) if trace or check is Check.PROFILE else None,
            expect=tuple(expect or ()),
        )
        diagnoses = list(_run(checks, request, show=not json))
    if check is Check.ALL:
        diagnoses.append(conclude(diagnoses, subject=subjects[0].name))
        if not json:
            _show(diagnoses[-1])
    if json:
        write_json(encode(diagnoses))
    code = exit_code_of(diagnoses)
    if code:
        raise typer.Exit(code)


@contextmanager
def _ended_properly() -> Iterator[None]:
    """Cleans up before the process ends on SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        echo("interrupted; the findings so far are lost")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _choose_checks(check: Check | None, models: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks to be made, in order."""
    if check is None:
        return _WITHOUT_MODEL
    if models and check is Check.ENV:
        raise typer.BadParameter(
            f"env examines the machine and takes no model, got {models[0]}", param_hint="MODEL"
        )
    if not models and check not in _WITHOUT_MODEL:
        raise typer.BadParameter(f"{check} needs a model", param_hint="MODEL")
    if len(models) > 1 and check is not Check.PARALLEL:
        raise typer.BadParameter(f"{check} takes one model, got {len(models)}", param_hint="MODEL")
    return tuple(one for one in Check if one is not Check.ALL) if check is Check.ALL else (check,)


def _refuse_unused(checks: Sequence[Check], values: Mapping[str, object]) -> None:
    """Refuses options that none of the checks uses."""
    for option, value in values.items():
        users = _USERS[option]
        if value and not set(users) & set(checks):
            problem = f"only for {', '.join(users)} and all, got {' and '.join(checks)}"
            raise typer.BadParameter(problem, param_hint=option)


def _check_trace(trace: Path | None) -> None:
    """Finds out now what would otherwise fail when the model was profiled."""
    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        problem = f"expected a file in a folder that exists, got {trace}"
        raise typer.BadParameter(problem, param_hint="--trace")


def _run(checks: Sequence[Check], request: DoctorRequest, *, show: bool) -> Iterator[Diagnosis]:
    for check in checks:
        echo(f"{check}: …")
        try:
            diagnosis = _diagnose(check, request)
        except (PipelineError, OSError) as error:
            if len(checks) == 1:
                raise
            # One check that cannot be made is no reason to keep the others' answers back.
            diagnosis = _failed(check, error)
        if show:
            _show(diagnosis)
        yield diagnosis


def _failed(check: str, error: PipelineError | OSError) -> Diagnosis:
    hint = error.hint if isinstance(error, PipelineError) else None
    message = error.message if isinstance(error, PipelineError) else str(error)
    return Diagnosis(check, "", (Finding("check-failed", "problem", message, hint),))


def _show(diagnosis: Diagnosis) -> None:
    for table in diagnosis.tables:
        write_table(table)
    for finding in diagnosis.findings:
        mark = "PROBLEM" if finding.severity == "problem" else finding.severity
        write_line(f"{diagnosis.check}: {mark}: {finding.text}")
        if finding.hint is not None:
            write_line(f"  hint: {finding.hint}")
    write_line("")


def _resolve(devices: Sequence[str] | None) -> tuple[str, ...]:
    from ortprep.runtime.machine.hardware import read_hardware
    from ortprep.runtime.placement.devices import resolve_devices

    try:
        return tuple(device.name for device in resolve_devices(devices or "all", read_hardware()))
    except PoolError as error:
        raise typer.BadParameter(error.message, param_hint="--devices") from None


def _diagnose(check: Check, request: DoctorRequest) -> Diagnosis:
    subjects, device = request.subjects, request.devices[0]
    match check:
        case Check.ENV:
            from ortprep.doctor.environment.topics import diagnose_environment

            return diagnose_environment(artifacts=request.artifacts, expect=request.expect)
        case Check.INIT:
            from ortprep.doctor.initialisation.start import diagnose_initialisation

            return diagnose_initialisation(subjects[0], device=device, rounds=request.rounds)
        case Check.OPTIONS:
            from ortprep.doctor.variations import diagnose_options

            return diagnose_options(subjects[0], device=device, rounds=request.rounds)
        case Check.PARALLEL:
            from ortprep.doctor.parallel.experiment import diagnose_parallel

            return diagnose_parallel(subjects, devices=request.devices)
    from ortprep.doctor.profiling import diagnose_profile

    return diagnose_profile(subjects[0], device=device, trace=request.trace)


def _choose_trace(trace: Path | None, subject: DoctorModel) -> Path:
    """Returns the file for a profile's trace, which must not be the model."""
    chosen = trace or Path(f"{Path(subject.name).name}.trace.json")
    if subject.source is not None and chosen.exists() and chosen.samefile(subject.source):
        raise SpecError(f"--trace would replace the model\n  expected another file, got {chosen}")
    return chosen
