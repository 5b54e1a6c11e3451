"""The `ortprep` command, also as `python -m ortprep`; it imports the command line only where it is needed."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    if sys.argv[1:2] == ["run"]:
        from ortprep.cli.quick_run import run_program

        run_program(sys.argv[2:])
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


if __name__ == "__main__":
    main()
