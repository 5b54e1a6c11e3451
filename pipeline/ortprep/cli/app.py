"""The command line: every command, the options of them all, and the exit code."""

from __future__ import annotations

import logging
import traceback
from typing import Annotated

import typer

import ortprep
from ortprep.cli import (  # noqa: F401  puts the commands on the app
    application_commands,
    build_commands,
    bundle_commands,
    machine_commands,
    registry_commands,
    serving_commands,
)
from ortprep.cli.command import app
from ortprep.cli.console import echo, start_logging, start_streams, write_line

_PANELS = {
    "Prepare models": ("prepare", "init", "explain", "schema"),
    "Examine bundles and machines": ("show", "check", "compare", "doctor"),
    "Use bundles in existing applications": ("adopt", "run"),
    "Serve and export": ("host", "place", "serve-config", "export"),
    "Registries": ("publish", "pull", "promote", "rollback", "list", "versions", "verify", "gc"),
}
"""Commands in the order of `ortprep --help`."""


def _arrange_commands() -> None:
    order = [(name, panel) for panel, names in _PANELS.items() for name in names]
    panels = dict(order)
    for info in app.registered_commands:
        info.rich_help_panel = panels[str(info.name)]
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]
    app.registered_commands.sort(key=lambda info: list(panels).index(str(info.name)))


_arrange_commands()


def run() -> int:
    """Runs the command line and returns the exit code; where errors become messages."""
    start_streams()
    try:
        app(standalone_mode=True)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except Exception:  # noqa: BLE001 - errors of any code end here: what Python would write itself may quote a model
        echo(traceback.format_exc())
        return 1
    return 0


def _version(is_asked: bool) -> None:
    if is_asked:
        write_line(f"ortprep {ortprep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    log: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    del version
    if log is not None and log.upper() not in logging.getLevelNamesMapping():
        raise typer.BadParameter(f"expected debug, info, warning or error, got {log!r}", param_hint="--log")
    start_logging(log)
