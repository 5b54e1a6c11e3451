"""What a forked worker pays: a child function that loads a bundle, forks, and measures the fork."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeResult
from ortprep.errors import ChildError

if TYPE_CHECKING:
    from ortprep.runtime.tensors.element_types import Array

_MB = 2**20
_MAX_ANSWER_BYTES = 4096  # of a pipe, which takes this much at once
_MIN_RUNS = 5


@dataclass(frozen=True)
class ForkProbeRequest:
    """What is to be measured.

    Attributes:
        bundle: Folder of the bundle that `load_before_fork` opens.
        sample: `.npz` file with one array per input, by its name.
        steady_s: Seconds of repeated runs after the first.
    """

    bundle: str
    sample: str
    steady_s: float


def measure_fork(request: ForkProbeRequest, *, timeout_s: float) -> ProbeResult:
    """Measures one fork of a fresh process that loaded a bundle before.

    Returns:
        Figures of the forked child: `ready_ms` counts from the fork, `init_ms` is the fork itself, and
        `private_mb` is the memory that the child has written to.

    Raises:
        LoadError: The bundle cannot be loaded for forks.
        ChildError: A process died, or the deadline passed.
    """
    return run_child(run_fork, request, timeout_s=timeout_s).value


def run_fork(request: ForkProbeRequest) -> ProbeResult:
    """Loads, forks and returns what the child measured (child function); raises as `measure_fork`."""
    from ortprep.runtime import load_before_fork
    from ortprep.runtime.tensors.arrays import read_tensors

    session = load_before_fork(request.bundle)
    feeds = read_tensors(Path(request.sample))
    reader, writer = os.pipe()
    sys.stderr.flush()
    forked_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            result = _measure_here(session, feeds, forked_s, request.steady_s)
            os.write(writer, json.dumps(encode(result)).encode())
            code = 0
        except BaseException:  # noqa: BLE001  nothing of the parent's may run here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read(_MAX_ANSWER_BYTES)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code or not answer:
        raise ChildError(f"a forked process failed: {request.bundle}\n  expected exit code 0, got {code}")
    return decode(ProbeResult, json.loads(answer))


def _measure_here(session: Any, feeds: Mapping[str, Array], forked_s: float, steady_s: float) -> ProbeResult:
    """Runs in the forked process."""
    from statistics import median

    from ortprep.runtime.machine.process_memory import peak_rss_bytes, written_bytes

    entered_s = time.monotonic()
    session.run(None, feeds)
    answered_s = now_s = time.monotonic()
    times_s: list[float] = []
    while now_s < answered_s + steady_s or len(times_s) < _MIN_RUNS:
        session.run(None, feeds)
        before_s, now_s = now_s, time.monotonic()
        times_s.append(now_s - before_s)
    return ProbeResult(
        ready_ms=(answered_s - forked_s) * 1e3,
        init_ms=(entered_s - forked_s) * 1e3,
        first_ms=(answered_s - entered_s) * 1e3,
        steady_ms=median(times_s) * 1e3,
        private_mb=written_bytes() / _MB,
        peak_mb=peak_rss_bytes() / _MB,
        runs=len(times_s),
    )
