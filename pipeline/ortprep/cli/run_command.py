"""`ortprep run`: an application that creates its own sessions gets those of bundles."""

from __future__ import annotations

from typing import Annotated

import typer

from ortprep.cli import quick_run
from ortprep.cli.command import command


def run(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM", help="The program to run.")
    ] = None,
    bundles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="A bundle, a folder of bundles, or registry://NAME@VERSION; may be repeated. "
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
        quick_run.print_environment(bundles or [], verbose=verbose)
    elif program:
        quick_run.start_program(program, bundles or [], verbose=verbose)
    else:
        raise typer.BadParameter("expected a program, as in: ortprep run -- python app.py")


command(run, takes_program=True)
