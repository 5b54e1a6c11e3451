"""`ortprep --install-completion`, in a bash on a pseudo-terminal that has a home of its own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.prepare.builders import REPOSITORY

SCRIPTS = Path(sys.executable).parent
PATIENCE_S = 60.0


@pytest.mark.slow
def test_the_tab_key_completes_commands_once_completion_is_installed(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TERM": "dumb",
        "PS1": "$ ",
    }
    # More than one command, so that bash starts ortprep as its child and stays its parent.
    installed = subprocess.run(
        ["bash", "-c", "ortprep --install-completion; exit $?"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert installed.returncode == 0, installed.stderr
    assert "bash completion installed" in installed.stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["bash", "-i"], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as bash:
        os.close(theirs)
        try:
            os.write(ours, b"ortprep serve-ch\t")
            shown = _read_until(ours, "serve-check")
        finally:
            bash.kill()
            os.close(ours)
    assert "serve-check" in shown


def _read_until(descriptor: int, text: str) -> str:
    """Returns what a terminal shows until a text is there."""
    shown, end_s = b"", time.monotonic() + PATIENCE_S
    while text.encode() not in shown and time.monotonic() < end_s:
        if select.select([descriptor], [], [], 1.0)[0]:
            shown += os.read(descriptor, 65536)
    return shown.decode()
