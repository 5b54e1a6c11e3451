"""The base of all commands: the Typer app, common arguments, and output of results and errors."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from ortprep.bundle.codec import encode
from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.cli.console import INTERRUPTED, Block, echo, echo_error, write_blocks, write_json
from ortprep.errors import (
    DISK_ERRORS,
    BundleError,
    MissingExtraError,
    PipelineError,
    SpecError,
    hint_of_os_error,
)
from ortprep.quoting import quoted
from ortprep.spec.urls import redact_url
from ortprep.versions import install_command

P = ParamSpec("P")

# Typer reads the options of a command from its signature, so commands have as many parameters as options.
app = typer.Typer(
    name="ortprep",
    help="Prepare ONNX models once, so that ONNX Runtime sessions start sooner.\n\n"
    "Start with: ortprep prepare model.onnx",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _parse_folder(text: str | Path) -> Path:
    if "://" in str(text):
        raise typer.BadParameter(f"expected a folder on this machine, got the URL {redact_url(str(text))}")
    return Path(text)


Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Models; all by default.")]
Bundle = Annotated[str, typer.Argument(metavar="BUNDLE", help="Model, or path of a bundle.")]
Configs = Annotated[Path, typer.Option(metavar="DIR", parser=_parse_folder, help="Folder of specs.")]
Artifacts = Annotated[Path, typer.Option(metavar="DIR", parser=_parse_folder, help="Folder of bundles.")]
Target = Annotated[str | None, typer.Option(metavar="T", help="Build only this target: cpu or cuda.")]
Devices = Annotated[list[str] | None, typer.Option(metavar="D", help="all, cpu, cuda:0, …; may be repeated.")]
Precision = Annotated[
    str, typer.Option(metavar="P", help="fp32, fp16, …; by default the fastest that is accurate enough.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]

_EXTRAS = {
    **dict.fromkeys(("onnx", "doit", "yaml", "pydantic"), ("build",)),
    **dict.fromkeys(("google", "tritonclient"), ("triton",)),
    "fsspec": ("registry",),
}
"""What the package can be installed without, and the extras that bring it."""

CONFIGS = Path("configs")
ARTIFACTS = Path("artifacts")


@dataclass(frozen=True)
class Output:
    """The result of a command.

    Attributes:
        data: Records or JSON types, which `--json` writes.
        blocks: Lines and tables for people; they are made when they are written.
        error: Error of a command that failed although it has a result; None if it did not.
        exit_code: Exit code of a command that failed and has shown why; 0 if it did not.
    """

    data: Any
    blocks: Iterable[Block] = ()
    error: PipelineError | None = None
    exit_code: int = 0


def command(
    function: Callable[P, Output | None], *, group: typer.Typer = app, takes_program: bool = False
) -> Callable[P, None]:
    """Makes a function a command: its result is written, and what it raises becomes an exit code.

    Args:
        function: Returns what is to be written; with a parameter `json` that is set, as JSON.
        group: Typer app that gets the command.
        takes_program: Whether options after a program's name are the program's own.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            output = function(*args, **kwargs)
            if output is not None:
                _write(output, as_json=bool(kwargs.get("json")))
        except PipelineError as error:
            echo_error(error)
            raise typer.Exit(error.exit_code) from None
        except ModuleNotFoundError as error:
            extras = _EXTRAS.get(str(error.name).partition(".")[0])
            if extras is None:
                raise
            problem = f"this command needs {error.name}, which is not installed"
            echo_error(MissingExtraError(problem, hint=install_command(*extras)))
            raise typer.Exit(MissingExtraError.exit_code) from None
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            hint = hint_of_os_error(error, ".", tempfile.gettempdir())
            echo_error(PipelineError(str(error.strerror), hint=hint))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            echo(INTERRUPTED)
            raise typer.Exit(130) from None

    name = function.__name__.strip("_").replace("_", "-")
    settings = {"allow_interspersed_args": False} if takes_program else None
    return group.command(name=name, context_settings=settings)(guarded)


def _write(output: Output, *, as_json: bool) -> None:
    """Writes what a command returned; raises its error."""
    if as_json:
        write_json(encode(output.data))
    else:
        write_blocks(output.blocks)
    if output.error is not None:
        raise output.error
    if output.exit_code:
        raise typer.Exit(output.exit_code)


def check_writable(folder: Path, *, hint: str) -> None:
    """Raises unless files can be written to a folder, or to one that would be made; leaves nothing behind.

    Args:
        folder: The folder; it need not exist.
        hint: Command with another folder.

    Raises:
        SpecError: It is no folder, or not writable.
    """
    try:
        place = folder.absolute()
        with tempfile.TemporaryFile(
            dir=next(parent for parent in (place, *place.parents) if parent.exists())
        ):
            pass
    except OSError as error:
        problem = f"cannot write to {folder}\n  expected a folder, or a path where one can be made"
        raise SpecError(f"{problem}, got: {error.strerror}", hint=hint) from error


def exit_code_of(errors: Sequence[PipelineError]) -> int:
    """Returns the errors' own exit code where they agree."""
    kinds = {error.exit_code for error in errors}
    return kinds.pop() if len(kinds) == 1 else 1


def find_bundle(name: str, artifacts: Path) -> Path:
    """Returns the bundle at a path, or of a model.

    Raises:
        BundleError: There is neither.
    """
    bundle = locate_bundle(name, artifacts)
    if bundle is not None:
        return bundle
    if "://" in name or names_version(name):
        raise BundleError(
            f"no such bundle: {redact_url(name)}\n  expected a folder on this machine or a model's name",
            hint="ortprep pull NAME --registry URL --out DIR",
        )
    model = name if Path(name).is_file() else Path(name).name
    places = " or in ".join(dict.fromkeys((str(Path(name)), str(artifacts / name))))
    raise BundleError(
        f"no such bundle: {quoted(name)}\n  expected {MANIFEST_FILE} in {places}",
        hint=quoted("ortprep", "prepare", *filter(None, [model])),
    )


def names_version(text: str) -> bool:
    """Returns whether a text can be the `NAME@VERSION` of a bundle in a registry."""
    return "@" in text and "/" not in text


def locate_bundle(name: str, artifacts: Path) -> Path | None:
    """Returns the bundle's folder that a user names, by its path or by its name below `artifacts`."""
    paths = (Path(name), artifacts / name)
    return next((path for path in paths if (path / MANIFEST_FILE).is_file()), None)
