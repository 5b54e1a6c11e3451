"""Functions for child processes, most of them bad: what a crashing library or a careless author may do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.errors import IntegrityError

Request = Mapping[str, Any]


def echo(request: Request) -> dict[str, Any]:
    return {"request": dict(request), "pid": os.getpid(), "folder": str(Path.cwd()), "path": sys.path}


def kill_itself(request: Request) -> dict[str, Any]:
    os.kill(os.getpid(), request["signal"])
    return {}


def vanish(request: Request) -> dict[str, Any]:
    os._exit(0)


def exit_loudly(request: Request) -> dict[str, Any]:
    raise SystemExit(3)


def hang(request: Request) -> dict[str, Any]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("about to hang\n")
    sys.stdout.flush()
    note_pid(request["pid_file"], os.getpid())
    time.sleep(600)
    return {}


def raise_known(request: Request) -> dict[str, Any]:
    raise IntegrityError("bytes differ: weights\n  expected a, got ü", hint="ortprep check here")


def raise_value_error(request: Request) -> dict[str, Any]:
    raise ValueError("nobody foresaw this")


def raise_memory_error(request: Request) -> dict[str, Any]:
    raise MemoryError


def return_unserialisable(request: Request) -> dict[str, Any]:
    return {"when": object()}


def leave_grandchild(request: Request) -> dict[str, Any]:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return {"pid": grandchild.pid}


def fork_then_die(request: Request) -> dict[str, Any]:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    note_pid(request["pid_file"], pid)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def allocate(request: Request) -> dict[str, Any]:
    return {"length": len(bytearray(os.urandom(1)) * request["size_bytes"])}


def note_pid(path: str, pid: int) -> None:
    part = Path(f"{path}.part")
    part.write_text(str(pid))
    part.replace(path)


def write_to_full_disk(request: Request) -> dict[str, Any]:
    Path("/dev/full").write_text("x")
    return {}


def answer_on_full_disk(request: Request) -> dict[str, Any]:
    # Where the answer is written: the request's file and it are the process's arguments.
    Path(f"{sys.argv[2]}.part").symlink_to("/dev/full")
    sys.stdout.write("something that is never flushed")
    return {}
