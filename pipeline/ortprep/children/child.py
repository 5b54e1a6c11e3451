"""Functions run in fresh processes: a record in, a record out, a deadline, and errors that arrive whole.

Nothing heavy is ever done in the calling process: a session that crashes takes down its child only, memory is
given back when it ends, and what is measured is measured where nothing ran before. Requests and replies are
files, not pipes, so that ONNX Runtime may print what it likes.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import marshal
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children.process_group import end_with_parent, wait_for_end
from ortprep.errors import (
    DISK_ERRORS,
    ChildError,
    ChildKilledError,
    ChildTimeoutError,
    PipelineError,
    describe_exit,
    from_dict,
    to_dict,
)
from ortprep.runtime.dropin.import_hook import STARTUP_VARIABLE
from ortprep.runtime.loading.load_options import DIGESTS_VARIABLE, PRECISION_VARIABLE
from ortprep.runtime.machine.memory import peak_rss_bytes
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_VARIABLE

Q = TypeVar("Q")
R = TypeVar("R")

log = logging.getLogger(__name__)

_PARENT_VARIABLE = "ORTPREP_PARENT_PID"
_REQUEST, _REPLY, _OUTPUT = "request", "reply", "output"
_OS_ERROR = "OSError"
_BOOTSTRAP = """\
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    job = json.load(file)
sys.path[:] = job["path"]
from ortprep.children.child import main
main(job, sys.argv[2])
"""
_TAIL_BYTES = 8192
_MAX_REPLY_BYTES = 256 * 1024 * 1024
_NO_ROOM_EXIT = 74  # EX_IOERR of sysexits.h; all that can be said where there is no room for an answer


@dataclass(frozen=True)
class Reply(Generic[R]):
    """The answer of a child process.

    Attributes:
        value: Result of the function.
        started_s: `time.monotonic()` from just before the child was spawned; the child reads the same clock.
        peak_rss_bytes: Largest resident set the child saw, mapped pages included.
    """

    value: R
    started_s: float
    elapsed_s: float
    peak_rss_bytes: int


def run_child(
    function: Callable[[Q], R],
    request: Q,
    *,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    script: Path | None = None,
) -> Reply[R]:
    """Runs a function in a fresh Python process, which imports the function's module.

    The child finds the packages that this process finds, and no others.

    The request and what the function returns travel as JSON (`ortprep.bundle.codec`): records, spec sections,
    paths, tuples and scalars, of the types that the function's annotations name.

    Args:
        function: A function of a module, with one argument.
        request: Its argument.
        timeout_s: Seconds after which the child is killed; None waits for ever.
        memory_bytes: Most private memory the child may take, maps it could write to included; beyond that its
            allocations fail. None for no limit.
        script: File that is run in place of the few lines that call `main`. It finds its job in `marshal`'s
            format, and calls `main` itself; until then it does not end with this process.

    Raises:
        PipelineError: The function raised it, of the same class.
        ChildError: The child died of a signal, exited without an answer, or raised something else.
        ChildTimeoutError: The deadline passed.
        OSError: There is no room on the disk for what the function wrote, the request or the answer. No
            `PipelineError`, so that it is never taken for a failure of what was tried.
    """
    with scratch_folder("ortprep-child-") as folder:
        name = _name_of(function)
        path = [entry or str(Path.cwd()) for entry in sys.path]
        job = {"path": path, "function": name, "request": encode(request)}
        (folder / _REQUEST).write_bytes(json.dumps(job).encode() if script is None else marshal.dumps(job))
        code = ("-c", _BOOTSTRAP) if script is None else (str(script),)
        # -P, so that a file of the working folder is never taken for a module.
        command = [sys.executable, "-P", *code, str(folder / _REQUEST), str(folder / _REPLY)]
        process, started_s = _spawn(folder, command, memory_bytes)
        timed_out = wait_for_end(process, timeout_s)
        elapsed_s = time.monotonic() - started_s
        if timed_out:
            raise ChildTimeoutError(
                f"child process took too long: {name} (pid {process.pid})\n"
                f"  expected an answer within {timeout_s:g} s{_tail(folder / _OUTPUT)}"
            )
        reply = _read_reply(name, process, folder)
        value = decode(get_type_hints(function).get("return", Any), reply["value"])
        return Reply(value, started_s, elapsed_s, reply["peak_rss_bytes"])


def _name_of(function: Callable[[Q], R]) -> str:
    """Returns `module:function`; a module that `python -m` runs has its real name in `__spec__` only."""
    spec = sys.modules["__main__"].__spec__ if function.__module__ == "__main__" else None
    return f"{function.__module__ if spec is None else spec.name}:{function.__qualname__}"


def _spawn(
    folder: Path, command: list[str], memory_bytes: int | None
) -> tuple[subprocess.Popen[bytes], float]:
    """Returns the child, and when it was about to be spawned."""
    # Temporary files of a child that is killed go with its folder.
    # Sessions are made of the files that are named, even below `ortprep run`, and loaded as by default.
    own = dict.fromkeys((STARTUP_VARIABLE, DIGESTS_VARIABLE, PRECISION_VARIABLE), "")
    fixed = {_PARENT_VARIABLE: str(os.getpid()), "TMPDIR": str(folder), **own}
    variables = {TELEMETRY_VARIABLE: TELEMETRY_OFF, **os.environ, **fixed}
    with (folder / _OUTPUT).open("wb") as output:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            # A session of its own, so that what the child leaves running can be ended with it.
            start_new_session=True,
        )
    if memory_bytes is not None:
        _limit_memory(process.pid, memory_bytes)
    return process, started_s


def _read_reply(function: str, process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """Returns the parsed answer of a child that ended, or raises what it raised."""
    reply_file, output = folder / _REPLY, _tail(folder / _OUTPUT)
    if not reply_file.exists():
        if process.returncode == _NO_ROOM_EXIT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        message = (
            f"child process died: {function} (pid {process.pid})\n"
            f"  expected an answer, got {describe_exit(process.returncode)}{output}"
        )
        if process.returncode == -signal.SIGKILL:
            hint = "dmesg | grep -i 'out of memory'  (SIGKILL comes from outside, mostly for lack of memory)"
            raise ChildKilledError(message, hint=hint)
        raise ChildError(message)
    if reply_file.stat().st_size > _MAX_REPLY_BYTES:
        raise ChildError(
            f"answer of a child process is too large: {function}\n  expected under {_MAX_REPLY_BYTES} bytes"
        )
    reply: dict[str, Any] = json.loads(reply_file.read_bytes())
    if output:
        log.debug("%s (pid %d) said:%s", function, process.pid, output)
    if "error" in reply:
        error = reply["error"]
        if error["kind"] == _OS_ERROR:
            raise OSError(error["errno"], error["message"], error["file"])
        raise from_dict(error)
    return reply


def _tail(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode(errors="replace").strip()
    return f"\n{text}".replace("\n", "\n    ") if text else ""


def read_own_output(max_bytes: int) -> str:
    """Returns the first bytes that this child and its libraries have printed, as text.

    ONNX Runtime says some things on stderr and nowhere else.
    """
    # The folder for temporary files is the one that `run_child` made for this child.
    with Path(tempfile.gettempdir(), _OUTPUT).open("rb") as file:
        return file.read(max_bytes).decode(errors="replace")


def _limit_memory(pid: int, size_bytes: int) -> None:
    """Makes allocations beyond a size fail, before the kernel has to end some process for want of memory."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bounded = size_bytes if most == resource.RLIM_INFINITY else min(size_bytes, most)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_DATA, (bounded, most))


def _call(name: str, request: object) -> object:
    """Returns what the function `module:name` returns for a request that arrived as JSON."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    (hint,) = (hint for key, hint in get_type_hints(function).items() if key != "return")
    return function(decode(hint, request))


def _answer(function: str, request: object) -> str:
    """Returns the answer to a request as JSON: the function's value, or its error."""
    try:
        return _encode_value(function, _call(function, request))
    except PipelineError as error:
        return json.dumps({"error": to_dict(error)})
    except MemoryError:
        return json.dumps({"error": to_dict(ChildKilledError(f"out of memory: {function}"))})
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        fields = {
            "kind": _OS_ERROR,
            "errno": error.errno,
            "message": error.strerror,
            "file": error.filename,
        }
        return json.dumps({"error": fields}, default=os.fsdecode)


def _encode_value(function: str, value: object) -> str:
    try:
        return json.dumps({"value": encode(value), "peak_rss_bytes": peak_rss_bytes()})
    except (TypeError, ValueError) as error:
        raise ChildError(f"unreadable answer: {function}\n  expected JSON types only: {error}") from error


def main(job: Mapping[str, Any], reply_file: str) -> None:
    """Entry of the child process: runs a job, and writes the answer to a file."""
    end_with_parent(int(os.environ.get(_PARENT_VARIABLE, "0")))
    answer = _answer(job["function"], job["request"])
    # Renamed, so that a child killed while writing leaves no half reply.
    unfinished = Path(f"{reply_file}.part")
    try:
        unfinished.write_text(answer, encoding="utf-8")
        unfinished.replace(reply_file)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        os._exit(_NO_ROOM_EXIT)  # at once: what is left to say on stdout has no room either
