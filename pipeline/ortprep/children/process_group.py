"""Processes that lead a group of their own: waited for, and ended with all that they have started.

What a program has started and moved into another session (`setsid`) is not ended with it. If this process is
killed, the kernel ends the program alone, and not what the program has started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG = 1
"""Operation of `prctl` that has the kernel send a signal to a process when its parent ends."""

_LONGEST_WAIT_MS = 2**31 - 1
"""What `poll` takes at most, in milliseconds: 24 days."""

_START = f"""\
import ctypes, os, signal, sys
parent, refusal, *command = sys.argv[1:]
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != int(parent):
    raise SystemExit("the process that asked for this work is gone")
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(command[0], command)
except OSError as error:
    with open(refusal, "w", encoding="utf-8") as file:
        file.write(error.strerror)
"""


def start_program(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    refusal: Path,
    stdout: BinaryIO,
    stderr: BinaryIO,
) -> subprocess.Popen[bytes]:
    """Starts a program that the kernel kills when the thread that starts it ends, however it ends.

    Args:
        command: The program and its arguments; the program is looked for on the environment's PATH.
        folder: Folder to run it in.
        environment: All its environment variables.
        refusal: File that is written if the program cannot be started: why not.
        stdout: File that its stdout goes to.
        stderr: File that its stderr goes to.

    Raises:
        OSError: There is no such folder, or no process can be made.
    """
    # The lines that come before the program take nothing from its environment.
    start = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), str(refusal)]
    return subprocess.Popen(
        [*start, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def wait_for_end(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Waits for a process, ends what is left of its group, and returns whether the deadline passed.

    Args:
        process: Leader of a process group.
        timeout_s: Deadline in seconds, after which the group is killed; None waits for ever.
    """
    expired = False
    wait_ms = None if timeout_s is None else min(max(timeout_s * 1000, 0), _LONGEST_WAIT_MS)
    try:
        # Unreaped, the child's number stays taken, so that nobody else's group can be killed by mistake.
        with suppress(ProcessLookupError):  # a program that ignores SIGCHLD has its children reaped at once
            descriptor = os.pidfd_open(process.pid)
            try:
                ends = select.poll()
                ends.register(descriptor, select.POLLIN)
                expired = not ends.poll(wait_ms)
            finally:
                os.close(descriptor)
    finally:
        _kill_group(process)
        process.wait()
    return expired


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
