"""`ortprep adopt`: specs for the models that an application loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortprep.adopt.observation import MAX_MODELS
from ortprep.cli.command import CONFIGS, AsJson, Output, check_writable, command
from ortprep.cli.console import Block, Talk, echo
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.tables import Table, fill_table
from ortprep.versions import installed_onnxruntime

if TYPE_CHECKING:
    from ortprep.adopt.adoption import AdoptedModel
    from ortprep.adopt.observation import ProcessRecord


def adopt(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM", help="The application to run.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the specs.")] = CONFIGS,
    force: Annotated[bool, typer.Option("--force", help="Replace existing specs.")] = False,
    json: AsJson = False,
) -> Output:
    """Run `ortprep adopt -- python app.py` once to get a spec for each model that the program loads."""
    if not program:
        raise typer.BadParameter("expected a program, as in: ortprep adopt -- python app.py")
    check_writable(out, hint=f"ortprep adopt --out FOLDER -- {quoted(*program)}")
    from ortprep.adopt.adoption import adopt_models
    from ortprep.adopt.recorded_run import read_records, run_recorded
    from ortprep.children.scratch_folder import scratch_folder

    with scratch_folder("ortprep-adopt-") as records:
        code = run_recorded(program, records)
        if code:
            echo(f"{program[0]} ended with exit code {code}")
        try:
            processes = read_records(records, say=echo)
        except SpecError:
            if code:
                raise typer.Exit(code) from None
            raise
        models = adopt_models(processes, records, out, force=force, say=echo)
    _warn(processes)
    failed = SpecError.exit_code if any(model.problem for model in models) else 0
    return Output(models, _report(models, out), exit_code=code or failed)


def _warn(processes: Sequence[ProcessRecord]) -> None:
    """Says what may be missing or wrong in a recording."""
    installed = installed_onnxruntime()
    for version in sorted({process.onnxruntime for process in processes} - {installed}):
        both = f"the application has ONNX Runtime {version}, this environment {installed}"
        echo(f"{both}: prepare with {version}")
    killed = [str(process.pid) for process in processes if process.models and not process.ended]
    if killed:
        echo(f"ended abruptly, so its last runs may be missing: process {', '.join(killed)}")
    lost = sum(process.lost for process in processes)
    if lost:
        echo(f"sessions not recorded, since a process had more than {MAX_MODELS} models: {lost}")


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
            ("shapes", lambda model: model.use.shape_count),
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
