"""The `ortprep` command, also as `python -m ortprep`; it imports the command line only where it is needed."""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main() -> None:
    """Runs the command line and exits with its code."""
    try:
        _run()
    except KeyboardInterrupt:  # before there is a command, which says what it leaves
        sys.exit(130)


def _run() -> None:
    if sys.argv[1:2] == ["run"]:
        _run_program(sys.argv[2:])
    _exit_when_terminated()
    from ortprep.telemetry import disable_telemetry

    disable_telemetry()
    try:
        from ortprep.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "ortprep":
            raise
        from ortprep.versions import hint_to_install

        sys.stderr.write(
            "error: the ortprep command needs the build's dependencies\n"
            f"  expected module {error.name}, got none\n\n"
            f"hint: {hint_to_install('build')}\n"
        )
        sys.exit(1)
    sys.exit(run())


def _exit_when_terminated() -> None:
    """Has SIGTERM and SIGHUP end a command as an exception does, so that it removes its temporary files.

    A command that was started with one of them ignored, as by nohup, goes on ignoring it.
    """

    def end(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - what a signal handler takes
        signal.signal(number, signal.SIG_DFL)  # who cannot wait for transfers under way asks again
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _run_program(arguments: Sequence[str]) -> None:
    """Does what the arguments of `ortprep run` say, in place of this process, without Typer.

    Typer's import takes longer than many a model, and a job waits for it. Returns if the arguments are wrong,
    or ask for help: then Typer, which has the same command, has to say so.
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
    from ortprep.runtime.dropin import launch

    try:
        if "--print-environment" in flags:
            launch.print_environment(bundles, verbose="--verbose" in flags)
        else:
            launch.start_program(program, bundles, verbose="--verbose" in flags)
    except Exception as error:  # raised again if it is no `PipelineError`, which no start waits for
        from ortprep.errors import PipelineError
        from ortprep.quoting import printable

        if not isinstance(error, PipelineError):
            raise
        sys.stderr.write(printable(f"error: {error}\n"))
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
