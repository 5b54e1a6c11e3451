"""`ortprep run` without Typer, whose import takes longer than many a model: a job waits for it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def run_program(arguments: Sequence[str]) -> None:
    """Runs the program that the arguments of `ortprep run` name, in place of this process.

    Returns if something is wrong with them, or help is asked for: then Typer has to say so.
    """
    from ortprep.runtime.dropin.launch import dropin_environment, replace_process

    rest, bundles, verbose = list(arguments), [], False
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option = rest.pop(0)
        if option == "--bundles" and rest:
            bundles.append(rest.pop(0))
        elif option.startswith("--bundles="):
            bundles.append(option.partition("=")[2])
        elif option == "--verbose":
            verbose = True
        else:
            return
    program = rest[1:] if rest[:1] == ["--"] else rest
    if not program:
        return
    try:
        replace_process(program, dropin_environment(bundles, os.environ, verbose=verbose))
    except Exception as error:
        from ortprep.errors import PipelineError

        if not isinstance(error, PipelineError):
            raise
