"""Runs an application once with a recorder in its Python processes, and reads what these wrote."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ortprep.adopt.observation import ProcessRecord
from ortprep.adopt.recorder import INPUTS_VARIABLE, RECORDS_VARIABLE
from ortprep.bundle.codec import decode, read_json
from ortprep.errors import BundleError, LaunchError, ProgramNotFoundError, SpecError
from ortprep.runtime.dropin.import_hook import startup_environment

MAX_RECORDS = 4096
"""Maximum number of processes whose records are read."""

_RECORDER = "ortprep.adopt.recorder:record_in"


def run_recorded(command: Sequence[str], records: Path, *, max_inputs: int = 0) -> int:
    """Runs a command to its end and returns its exit code, as a shell reports it.

    The command has this process's streams. Ctrl-C reaches it, and this process waits for it.

    Args:
        command: Program and arguments.
        records: Folder for the records of its Python processes.
        max_inputs: Number of real inputs that each process keeps of each model, in that folder.

    Raises:
        ProgramNotFoundError: There is no such program.
        LaunchError: It cannot be run.
    """
    own = {RECORDS_VARIABLE: str(records), INPUTS_VARIABLE: str(max_inputs)}
    environment = startup_environment(_RECORDER, {**os.environ, **own})
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        kind = ProgramNotFoundError if isinstance(error, FileNotFoundError) else LaunchError
        raise kind(f"cannot run {command[0]}: {error.strerror}") from error
    with _signals_passed_to(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes on signals that end a process; a terminal sends its SIGINT to both already."""

    def pass_on(number: int, _frame: object) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, pass_on) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def read_records(folder: Path, say: Callable[[str], None]) -> tuple[ProcessRecord, ...]:
    """Returns the records of all processes, the oldest file first, without those that cannot be read.

    Args:
        folder: Where they are.
        say: Told which record cannot be read, and why.

    Raises:
        SpecError: There is none, none that can be read, or more than `MAX_RECORDS`.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise SpecError(
            "the program created no ONNX Runtime session\n"
            "  expected a Python process, 3.11 or newer, that imports onnxruntime, got none",
            hint="python's options -E, -I and -S disable the recorder; run the program without them",
        )
    if len(files) > MAX_RECORDS:
        raise SpecError(
            f"too many processes\n  expected at most {MAX_RECORDS} that load models, got {len(files)}"
        )
    records = []
    for path in files:
        try:
            records.append(decode(ProcessRecord, read_json(path)))
        except BundleError as error:
            say(f"skipped the record of a process: {error.message}")
    if not records:
        raise SpecError(f"no record can be read\n  expected one of {len(files)}, got none")
    return tuple(records)
