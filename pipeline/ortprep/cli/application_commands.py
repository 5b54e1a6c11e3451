"""The commands for existing applications: `adopt` writes specs for their models, `run` gives them bundles."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ortprep.cli.command import CONFIGS, AsJson, Output, check_writable, command
from ortprep.cli.console import Block, Talk, echo
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.runtime.dropin import launch
from ortprep.tables import Table, fill_table
from ortprep.versions import installed_onnxruntime

if TYPE_CHECKING:
    from ortprep.adopt.adoption import AdoptedModel
    from ortprep.adopt.observation import ProcessRecord

MAX_INPUTS = 1024
_DEFAULT_INPUTS = 32
_KEEPING = (
    "keeping up to {} real inputs of each model below {}, readable by you only: they may be private; "
    "no bundle and no registry gets them"
)
_ARGUMENTS = "the specs contain the program's arguments; pass secrets by environment variables"
AUTO = "auto"


def adopt(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM", help="The application to run.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the specs.")] = CONFIGS,
    force: Annotated[bool, typer.Option("--force", help="Replace existing specs.")] = False,
    record_inputs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_INPUTS,
            help="Keep up to N real inputs of each model, which may be private, beside the specs.",
        ),
    ] = 0,
    precision: Annotated[
        Literal["fp32", "auto"],
        typer.Option(help="auto: also prepare int8 where it is faster; it keeps 32 real inputs by default."),
    ] = "fp32",
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="Let the program judge it: stdout, a file that it writes, or your file.py:function.",
        ),
    ] = None,
    json: AsJson = False,
) -> Output:
    """Run `ortprep adopt -- python app.py` once to get a spec for each model that the program loads."""
    if not program:
        raise typer.BadParameter("expected a program, as in: ortprep adopt -- python app.py")
    if judge is not None and precision != AUTO:
        raise typer.BadParameter("expected --precision auto with --judge")
    convert = _convert_section(program, out, judge) if precision == AUTO else None
    max_inputs = record_inputs or (_DEFAULT_INPUTS if precision == AUTO else 0)
    check_writable(out, hint=f"ortprep adopt --out FOLDER -- {quoted(*program)}")
    from ortprep.adopt.adoption import SAMPLES_FOLDER, adopt_models
    from ortprep.adopt.recorder import read_records, run_recorded
    from ortprep.bundle.scratch_folder import scratch_folder

    if judge is not None:
        echo(_ARGUMENTS)
    with scratch_folder("ortprep-adopt-") as records:
        if max_inputs:
            echo(_KEEPING.format(max_inputs, out / SAMPLES_FOLDER))
        code = run_recorded(program, records, max_inputs=max_inputs)
        if code:
            echo(f"{program[0]} ended with exit code {code}")
        try:
            processes = read_records(records, say=echo)
        except SpecError:
            if code:
                raise typer.Exit(code) from None
            raise
        models = adopt_models(
            processes, records, out, force=force, max_inputs=max_inputs, convert=convert, say=echo
        )
    _warn(processes)
    failed = SpecError.exit_code if any(model.problem for model in models) else 0
    return Output(models, _report(models, out), exit_code=code or failed)


def _convert_section(program: Sequence[str], out: Path, judge: str | None) -> dict[str, Any]:
    """Returns the section `convert` of the specs; paths in it are relative to them."""
    section: dict[str, Any] = {"precision": AUTO}
    if judge is not None:
        file, separator, function = judge.rpartition(":")
        own = f"{os.path.relpath(file, out)}:{function}" if separator and file.endswith(".py") else judge
        section["judge"] = {"run": list(program), "folder": os.path.relpath(Path.cwd(), out), "compare": own}
    return section


def _warn(processes: Sequence[ProcessRecord]) -> None:
    """Says if the application has another ONNX Runtime."""
    installed = installed_onnxruntime()
    for version in sorted({process.onnxruntime for process in processes} - {installed}):
        both = f"the application has ONNX Runtime {version}, this environment {installed}"
        echo(f"{both}: prepare with {version}")


def _report(models: Sequence[AdoptedModel], out: Path) -> Iterator[Block]:
    """Yields a table of the models, what was not taken of them, and the next command."""
    yield _build_table(models)
    for model in models:
        for line in (model.problem, *(f"not kept: {option}" for option in model.left_out)):
            if line:
                yield Talk(f"{model.name or model.model}: {line}")
    new = [model.name for model in models if model.name is not None and model.is_new]
    unchanged = [model.name for model in models if model.name is not None and not model.is_new]
    if unchanged:
        yield Talk(f"left as they are: {', '.join(unchanged)}   (--force replaces them)")
    if new:
        yield Talk(f"next: {quoted('ortprep', 'prepare', *new, '--configs', out)}")


def _build_table(models: Sequence[AdoptedModel]) -> Table:
    """Returns one row per model of the application."""
    return fill_table(
        "models of the application",
        models,
        (
            ("spec", lambda model: model.name),
            ("model", lambda model: _shorten(model.model)),
            ("sessions", lambda model: model.use.loads),
            ("runs", lambda model: model.use.runs),
            ("shapes", lambda model: model.use.shapes),
            ("options", lambda model: ", ".join(_describe_options(model)) or "defaults"),
        ),
    )


def _shorten(model: str) -> str:
    """Returns a path inside a package from the package on, and any other one from the working folder on."""
    inside = model.rpartition("-packages/")[2]
    return inside.removeprefix(f"{Path.cwd()}/")


def _describe_options(model: AdoptedModel) -> list[str]:
    options = model.use.model.options
    settings = {**options.attributes, **options.config_entries}
    return [f"{name}={value}" for name, value in settings.items()]


command(adopt, takes_program=True)


def run(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM", help="The program to run.")
    ] = None,
    bundles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="A bundle, or a folder of bundles; may be repeated. "
            "By default $ORTPREP_BUNDLES, else artifacts/.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Write one line per session: its bundle, or why it has none.")
    ] = False,
    print_environment: Annotated[
        bool,
        typer.Option(
            "--print-environment", help="Print environment variables with the same effect, and run nothing."
        ),
    ] = False,
) -> None:
    """Run a program with bundles of its models: `ortprep run -- python app.py`."""
    if print_environment:
        launch.print_environment(bundles or [], verbose=verbose)
    elif program:
        launch.start_program(program, bundles or [], verbose=verbose)
    else:
        raise typer.BadParameter("expected a program, as in: ortprep run -- python app.py")


command(run, takes_program=True)
