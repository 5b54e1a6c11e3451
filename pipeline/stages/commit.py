"""Which commit a spec is from: provenance, recorded where there is a repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from pipeline.bundle.manifest import GitState

_TIMEOUT_S = 20.0
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def read_git_state(folder: Path) -> GitState | None:
    """Returns the commit of the repository that a folder lies in, None where there is none or no git.

    Args:
        folder: Any folder.
    """
    commit = _run(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _COMMIT.fullmatch(commit.strip()):
        return None
    status = _run(folder, "status", "--porcelain", "--untracked-files=no")
    return GitState(commit.strip(), modified=status is None or bool(status.strip()))


def _run(folder: Path, *arguments: str) -> str | None:
    # Without optional locks: a build must not get in the way of who works in the repository.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
