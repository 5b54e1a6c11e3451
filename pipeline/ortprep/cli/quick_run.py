"""`ortprep run` without Typer, whose import takes longer than many a model: a job waits for it.

Typer has the same command for its help and its usage errors.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def run_program(arguments: Sequence[str]) -> None:
    """Does what the arguments of `ortprep run` say, in place of this process.

    Returns if they are wrong, or ask for help: then Typer has to say so.
    """
    rest, bundles, flags = list(arguments), [], set()
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option = rest.pop(0)
        if option == "--bundles" and rest:
            bundles.append(rest.pop(0))
        elif option.startswith("--bundles="):
            bundles.append(option.partition("=")[2])
        elif option in ("--verbose", "--print-environment"):
            flags.add(option)
        else:
            return
    program = rest[1:] if rest[:1] == ["--"] else rest
    if not program and "--print-environment" not in flags:
        return
    try:
        if "--print-environment" in flags:
            print_environment(bundles, verbose="--verbose" in flags)
        else:
            start_program(program, bundles, verbose="--verbose" in flags)
    except Exception as error:
        from ortprep.errors import PipelineError
        from ortprep.quoting import printable

        if not isinstance(error, PipelineError):
            raise
        sys.stderr.write(printable(f"error: {error}\n"))
        sys.exit(error.exit_code)
    sys.exit(0)


def start_program(program: Sequence[str], bundles: Sequence[str], *, verbose: bool) -> None:
    """Runs a program in place of this process; raises as `dropin_environment` and `replace_process`."""
    from ortprep.runtime.dropin.launch import dropin_environment, replace_process

    replace_process(program, dropin_environment(bundles, os.environ, verbose=verbose))


def print_environment(bundles: Sequence[str], *, verbose: bool) -> None:
    """Writes the variables that do what the command does, one per line; raises as `dropin_environment`."""
    from ortprep.runtime.dropin.launch import FORK_VARIABLE, SIGNATURE_VARIABLE, dropin_environment

    environment = dropin_environment(bundles, os.environ, verbose=verbose)
    for name, value in sorted(environment.items()):
        if os.environ.get(name) != value or name in (FORK_VARIABLE, SIGNATURE_VARIABLE):
            sys.stdout.write(f"{name}={value}\n")
