"""The command about a machine: `doctor`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import typer

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.cli.command import (
    ARTIFACTS,
    Artifacts,
    AsJson,
    Devices,
    Output,
    command,
    locate_bundle,
)
from ortprep.cli.console import Block, echo
from ortprep.doctor.diagnosis import Diagnosis
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.errors import PoolError, SpecError
from ortprep.measuring.device_lock import working
from ortprep.runtime.loading.golden import read_golden
from ortprep.runtime.tensors.arrays import write_tensors

Check: TypeAlias = Literal["env", "init", "parallel"]
"""What the doctor examines."""

_USERS: dict[str, tuple[Check, ...]] = {
    "--rounds": ("init",),
    "--devices": ("init",),
    "--expect": ("env",),
    "--shape": ("init", "parallel"),
}
"""Options, and the checks that use them."""

_ROUNDS = 5
_SIZES = re.compile(r"(\d{1,9}(,\d{1,9}){0,31})?")

Shapes = Mapping[str, tuple[int, ...]]

Shape = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=1,3,224,224", help="Shape of an input that the model leaves open."),
]


@command
def doctor(
    check: Annotated[
        Check, typer.Argument(metavar="CHECK", help=f"One of {', '.join(get_args(Check))}; by default env.")
    ] = "env",
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="ONNX file, or bundle: its path, or name."),
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    shape: Shape = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=99, help="Fresh processes per figure of init; 5 by default.")
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="Report a problem if this cannot be used: cuda, or a full name."),
    ] = None,
    json: AsJson = False,
) -> Output:
    """Find out where the time of loading a model goes, and what would help."""
    _refuse_unused(check, {"--rounds": rounds, "--devices": devices, "--expect": expect, "--shape": shape})
    if (model is None) != (check == "env"):
        got = "needs a model" if model is None else f"examines the machine and takes no model, got {model}"
        raise typer.BadParameter(f"{check} {got}", param_hint="MODEL")
    shapes, device = parse_shapes(shape or ()), _resolve(devices)
    if model is None:
        from ortprep.doctor.environment import diagnose_environment

        diagnosis = diagnose_environment(artifacts=artifacts, expect=expect or ())
    else:
        with scratch_folder("ortprep-doctor-") as folder:
            subject = _examine(model, folder, artifacts=artifacts, shapes=shapes)
            echo(f"{check}: …")
            diagnosis = _diagnose(check, subject, device, rounds=rounds or _ROUNDS)
    return Output([diagnosis], _blocks(diagnosis), exit_code=diagnosis.exit_code)


def _diagnose(check: Check, subject: DoctorModel, device: str, *, rounds: int) -> Diagnosis:
    """Makes a check of a model; raises what the check raises."""
    if check == "init":
        from ortprep.doctor.initialisation import diagnose_initialisation

        return diagnose_initialisation(subject, device=device, rounds=rounds)
    from ortprep.doctor.parallel import diagnose_parallel

    return diagnose_parallel(subject)


def _refuse_unused(check: Check, values: Mapping[str, object]) -> None:
    """Refuses options that the check does not use."""
    for option, value in values.items():
        if value and check not in _USERS[option]:
            problem = f"only for {', '.join(_USERS[option])}, got {check}"
            raise typer.BadParameter(problem, param_hint=option)


def _blocks(diagnosis: Diagnosis) -> Iterator[Block]:
    yield from diagnosis.tables
    for finding in diagnosis.findings:
        mark = "PROBLEM" if finding.severity == "problem" else finding.severity
        yield f"{diagnosis.check}: {mark}: {finding.text}"
        if finding.hint is not None:
            yield f"  hint: {finding.hint}"


def _resolve(devices: Sequence[str] | None) -> str:
    """Returns the first device that a user names; by default a GPU, or the CPU where there is none."""
    from ortprep.runtime.machine.hardware import read_hardware
    from ortprep.runtime.placement import resolve_devices

    try:
        return resolve_devices(devices or "all", read_hardware())[0].name
    except PoolError as error:
        raise typer.BadParameter(error.message, param_hint="--devices") from None


def _examine(name: str, folder: Path, *, artifacts: Path, shapes: Shapes) -> DoctorModel:
    """Returns the model that a user names: an ONNX file or a bundle.

    Args:
        name: Name of the model.
        folder: Temporary folder for an input that is made for it.
        artifacts: Folder of bundles.
        shapes: Shapes of the inputs of an ONNX file.

    Raises:
        SpecError: There is no such model, or shapes are given for what has its own.
        PipelineError: It cannot be read.
    """
    path = Path(name)
    if path.is_file() and path.name != MANIFEST_FILE:
        with working():
            return _examine_source(path.absolute(), folder, shapes=shapes)
    if shapes:
        raise SpecError(f"--shape is for ONNX files only, got {name}\n  expected no --shape")
    bundle = locate_bundle(name, artifacts)
    if bundle is None:
        raise SpecError(
            f"no such model: {name}\n  expected an ONNX file or a bundle, got none",
            hint="ortprep doctor --help",
        )
    with working():
        root, sample = bundle.absolute(), folder / "sample.npz"
        config = read_loader_config(root)
        write_tensors(sample, read_golden(config.golden, root)[0])
        return DoctorModel(config.name, str(sample), root, is_bundle=True)


def _examine_source(source: Path, folder: Path, *, shapes: Shapes) -> DoctorModel:
    """Returns an ONNX file as a subject, with an input that `init` finds; raises what `_examine` raises."""
    from ortprep.init.input_search import ObservedInput
    from ortprep.init.trial_run import write_sample

    known = {name: ObservedInput((shape,), reason="--shape") for name, shape in shapes.items()}
    for name, feed in write_sample(source, folder / "sample.npz", known).items():
        if feed.reason:
            echo(f"{source.stem}: {name}: shape {list(feed.shape)} ({feed.reason})")
    return DoctorModel(source.stem, str(folder / "sample.npz"), source)


def parse_shapes(texts: Sequence[str]) -> Shapes:
    """Returns shapes by input, from `NAME=1,3,224,224`.

    Raises:
        SpecError: One is not written so.
    """
    shapes = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        if not name or not _SIZES.fullmatch(sizes):
            raise SpecError(f"bad shape: {text!r}\n  expected NAME=1,3,224,224, got another text")
        shapes[name] = tuple(int(size) for size in sizes.split(",") if size)
    return shapes
