"""`ortprep run`: an application that makes its own sessions gets those of bundles."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from ortprep.cli.command import command
from ortprep.cli.console import write_line
from ortprep.runtime.dropin.launch import dropin_environment, replace_process


def run(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="-- PROGRAM [ARGUMENT]...", help="What to run.")
    ] = None,
    bundles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="A bundle, a folder of bundles, or registry://NAME@VERSION; may be given several times. "
            "Else $ORTPREP_BUNDLES, else artifacts/.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Write one line per session: its bundle, or why it has none.")
    ] = False,
    print_environment: Annotated[
        bool,
        typer.Option("--print-environment", help="Write the variables that do the same, and run nothing."),
    ] = False,
) -> None:
    """Run a program whose ONNX Runtime sessions come from bundles, wherever one is of the same model."""
    environment = dropin_environment(bundles or [], os.environ, verbose=verbose)
    if print_environment:
        changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        for name, value in sorted(changed.items()):
            write_line(f"{name}={shlex.quote(value)}")
        return
    if not program:
        raise typer.BadParameter("expected a program, as in: ortprep run -- python app.py")
    replace_process(program, environment)


command(run, takes_program=True)
