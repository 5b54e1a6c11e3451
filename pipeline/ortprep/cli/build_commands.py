"""The commands of a build: `init`, `prepare`, `explain` and `schema`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortprep.cli.command import (
    ARTIFACTS,
    CONFIGS,
    Artifacts,
    AsJson,
    Configs,
    Names,
    Output,
    Target,
    check_writable,
    command,
    exit_code_of,
)
from ortprep.cli.console import echo, echo_error, write_json, write_line
from ortprep.cli.progress import BuildObserver
from ortprep.errors import PipelineError, SpecError
from ortprep.quoting import quoted

if TYPE_CHECKING:
    from ortprep.init import InitResult

_MODEL_SUFFIX = ".onnx"

NamesOrFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        help="Models, or ONNX files, which get a spec first if they have none; all models by default.",
    ),
]


@command
def prepare(
    names: NamesOrFiles = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
) -> None:
    """Build the bundles that are not up to date, as `doit prepare` does; ONNX files get a spec first."""
    from ortprep.build.build_plan import plan_builds
    from ortprep.build.runner import run_builds

    specs = names_of_specs(names or (), configs)
    builds = plan_builds(configs, artifacts, names=specs, only=target)
    if errors := run_builds(builds, BuildObserver()):
        raise typer.Exit(exit_code_of(errors))


@command
def explain(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    json: AsJson = False,
) -> Output:
    """Say what `prepare` would do, and why."""
    from ortprep.build.build_plan import plan_builds
    from ortprep.build.explanations import explain_tasks, format_explanations
    from ortprep.bundle.digest import DigestCache

    builds = plan_builds(configs, artifacts, names=names or (), only=target)
    explanations = [item for tasks in builds for item in explain_tasks(tasks, cache=DigestCache())]
    data = [{"model": e.model, "task": str(e.task), "reasons": e.reasons} for e in explanations]
    return Output(data, format_explanations(explanations))


@command
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from ortprep.spec.models import spec_schema

    write_json(spec_schema())


@command
def init(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="ONNX files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of specs.")] = CONFIGS,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the spec; only with one model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing specs.")] = False,
) -> None:
    """Write specs for models: inputs, shapes and ranges that the models run on, with a reason for each."""
    if name is not None and len(models) > 1:
        raise SpecError(
            f"one name for several models: {name}\n  expected one model with --name, got {len(models)}",
            hint=quoted("ortprep", "init", models[0], "--name", name),
        )
    errors: list[PipelineError] = []
    for model in models:
        try:
            result = _write_spec(model, out, name=name, force=force)
        except PipelineError as error:
            echo_error(error)
            errors.append(error)
            continue
        write_line(str(result.path))
        if result.question:
            errors.append(SpecError(result.question))
    if errors:
        raise typer.Exit(exit_code_of(errors))


def names_of_specs(names: Sequence[str], configs: Path) -> tuple[str, ...]:
    """Returns names of specs for what a user named; a model file without a spec gets one first.

    Raises:
        PipelineError: The reasons of `init_spec`.
    """
    return tuple(_name_of_spec(name, configs) if _is_model(name, configs) else name for name in names)


def _is_model(name: str, configs: Path) -> bool:
    """Says whether a user means a model's file, even if there is none, rather than a spec."""
    return "://" in name or (name.endswith(_MODEL_SUFFIX) and not (configs / f"{name}.yaml").is_file())


def _name_of_spec(model: str, configs: Path) -> str:
    """Returns the name of a model's spec, which is written if there is none."""
    from ortprep.init import find_spec_name

    return find_spec_name(Path(model), configs) or _write_spec(model, configs).spec.name


def _write_spec(model: str, out: Path, *, name: str | None = None, force: bool = False) -> InitResult:
    """Writes the spec of a model that has none, and says how many tries it took."""
    from ortprep.init import find_spec_name, init_spec

    spec_name = find_spec_name(Path(model), out)
    if spec_name is not None and name in (None, spec_name) and not force:
        raise SpecError(
            f"spec exists: {spec_name} in {out} is the spec of {model}\n  expected a model without a spec",
            hint=f"{_spec_command('prepare', spec_name, '--configs', out)}, or "
            f"{_spec_command('init', model, '--out', out)} --force",
        )
    check_writable(out, hint="ortprep init MODEL --out DIR")
    result = init_spec(model, folder=out, name=name, say=echo, may_drop_zip_map=True)
    result.write(force=force)
    attempts = result.trial.attempts
    tries = "the first try" if attempts == 1 else f"try {attempts}"
    if not result.question:
        echo(f"wrote {result.path}: the model ran on {tries}")
    else:
        echo(f"wrote {result.path}, which has an open question: {result.question}")
    return result


def _spec_command(action: str, subject: str | Path, option: str, folder: Path) -> str:
    """Returns a command to run, with the folder of specs where it is not the default."""
    return quoted("ortprep", action, subject, *(() if folder == CONFIGS else (option, folder)))
