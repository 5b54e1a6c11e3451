"""`ortprep init`, and what `prepare` does with a model file that has no spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortprep.cli.command import CONFIGS, check_writable, command, exit_code_of
from ortprep.cli.console import echo, echo_error, write_line
from ortprep.errors import PipelineError, SpecError
from ortprep.quoting import quoted

if TYPE_CHECKING:
    from ortprep.init import InitResult

_MODEL_SUFFIX = ".onnx"


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
        if result.question is not None:
            errors.append(SpecError(result.question.text))
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
    from ortprep.init import find_spec_name, refresh_tensor_copy

    spec_name = find_spec_name(Path(model), configs, or_copy=True)
    if spec_name is not None:
        refresh_tensor_copy(Path(model), configs)
        return spec_name
    return _write_spec(model, configs).spec.name


def _write_spec(model: str, out: Path, *, name: str | None = None, force: bool = False) -> InitResult:
    """Writes the spec of a model that has none, and says how many tries it took."""
    from ortprep.init import find_spec_name, init_spec

    spec_name = find_spec_name(Path(model), out, or_copy=True)
    if spec_name is not None and name in (None, spec_name) and not force:
        raise SpecError(
            f"spec exists: {spec_name} in {out} is the spec of {model}\n  expected a model without a spec",
            hint=f"{_spec_command('prepare', spec_name, '--configs', out)}, or "
            f"{_spec_command('init', model, '--out', out)} --force",
        )
    check_writable(out, hint="ortprep init MODEL --out DIR")
    result = init_spec(model, folder=out, name=name, say=echo, may_copy=True)
    result.write(force=force)
    attempts = result.trial.attempts
    tries = "the first try" if attempts == 1 else f"try {attempts}"
    if result.question is None:
        echo(f"wrote {result.path}: the model ran on {tries}")
    else:
        echo(f"wrote {result.path}, which has an open question: {result.question.text}")
    return result


def _spec_command(action: str, subject: str | Path, option: str, folder: Path) -> str:
    """Returns a command to run, with the folder of specs where it is not the default."""
    return quoted("ortprep", action, subject, *(() if folder == CONFIGS else (option, folder)))
