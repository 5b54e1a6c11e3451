"""Processes that lead a group of their own: waited for, and ended with all that they have started.

What a program has started and moved into another session (`setsid`) is not ended with it. If this process is
killed, the kernel ends the program alone, and not what the program has started.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1

# Looked up here: a child that was forked while another thread opened a library cannot open one itself.
_prctl = ctypes.CDLL(None).prctl

_LONGEST_WAIT_MS = 2**31 - 1
"""What `poll` takes at most, in milliseconds: 24 days."""


def end_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, so that a killed build leaves nothing.

    Args:
        parent: The parent's number; this process exits if that has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # nobody is left to tell, and a fork must not run what its parent does when it exits


def start_program(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    stdout: BinaryIO,
    stderr: BinaryIO,
) -> subprocess.Popen[bytes]:
    """Starts a program that the kernel kills when the thread that starts it ends, however it ends.

    Args:
        command: The program and its arguments; the program is looked for on the environment's PATH.
        folder: Folder to run it in.
        environment: All its environment variables.
        stdout: File that its stdout goes to.
        stderr: File that its stderr goes to.

    Raises:
        OSError: There is no such program or folder, or no process can be made.
    """
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        # It takes no lock that another thread may hold: it opens no library and imports nothing.
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
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
