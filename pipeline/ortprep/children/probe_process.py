"""The measurements of a process on its session; imported once that is made, so that nothing is too early."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ortprep.bundle.codec import decode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.process_group import end_with_parent
from ortprep.errors import LoadError
from ortprep.runtime.loading.phases import wait_steady
from ortprep.runtime.loading.session import CUDA, build_session, onnxruntime_errors
from ortprep.runtime.machine.memory import peak_rss_bytes, private_bytes, written_bytes
from ortprep.runtime.tensors.arrays import read_tensors, run_session

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.tensors.element_types import Array

_MB = 2**20
_MIN_RUNS = 5
_MAX_RUNS = 20_000


class PreparedRun(NamedTuple):
    """A session and a sample."""

    session: onnxruntime.InferenceSession
    feeds: Mapping[str, Array]

    def answer(self) -> dict[str, Array]:
        """Returns the outputs by name."""
        return run_session(self.session, self.feeds)


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a session that `probe_script` made, and measures.

    Args:
        request: The fields of a `ProbeRequest`; `gpu`, the name of the GPU that takes part or None; and what
            `probe_script.start` returned.

    Returns:
        The fields of a `ProbeResult` but `ready_ms` and `gpu_mb`; `ready_s`, when the first result would have
        been there had no sample been read, and of a fork `forked_s`, when it was made, both by
        `time.monotonic()`; and `gpu_bytes`, the GPU's memory in use at the end.

    Raises:
        LoadError: The session could not be made, or its first run failed.
    """
    return measure_runs(request)[0]


def measure_runs(request: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[PreparedRun, ...]]:
    """Does what `measure` does, and also returns what was run: one for every sample."""
    session = _session_of(request)
    began_s, imported_s, loaded_s = enter_fork() if request["forked"] else request["times_s"]
    run = PreparedRun(session, read_tensors(Path(request["sample"])))
    model = request["bundle"] or request["plan"]["model"]
    first_ms, _ = _time(lambda: _run_first(run, model))
    wait_steady(session)
    figures = {
        "ready_s": loaded_s + first_ms / 1e3,
        "init_ms": (loaded_s - imported_s) * 1e3,
        "first_ms": first_ms,
        **_measure_steady(run, request["steady_s"]),
    }
    more = [PreparedRun(session, read_tensors(Path(sample))) for sample in request["more_samples"]]
    figures |= {
        "more_steady_ms": [_measure_other(other, request["steady_s"]) for other in more],
        **_read_memory(session, request["gpu"]),
        **({"private_mb": written_bytes() / _MB, "forked_s": began_s} if request["forked"] else {}),
    }
    return figures, (run, *more)


def _session_of(request: Mapping[str, Any]) -> onnxruntime.InferenceSession:
    """Returns the session, or raises what is wrong with it or with how it was made."""
    error, session = request.get("error"), request.get("session")
    if request["bundle"] is None:
        plan = decode(SessionPlan, request["plan"])
        requested = [provider.name for provider in plan.providers]
        if session is None or session.get_providers()[: len(requested)] != requested:
            build_session(plan)  # which explains it
            error = error or LoadError(f"loading {plan.model} twice gave different results")
    if error is not None:
        raise error
    return session


def enter_fork() -> tuple[float, float, float]:
    """Goes on in a fork of this process, which waits for it and then ends as it did.

    Returns:
        The fork's start, and the ends of its imports, which take no time, and of its session, as `times_s`.
    """
    parent, forked_s = os.getpid(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        end_with_parent(parent)  # no fork inherits it
        return forked_s, forked_s, time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _time(function: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = function()
    return (time.perf_counter() - started) * 1e3, value


def _run_first(run: PreparedRun, model: str) -> None:
    """Runs a session for the first time; raises `LoadError` if ONNX Runtime refuses it."""
    try:
        run.answer()
    except onnxruntime_errors() as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in run.feeds.items())
        raise LoadError(
            f"cannot run {model}\n  with {shapes}: {type(error).__name__}: {error}",
            hint="give shapes that it takes: in its spec, or the doctor --shape NAME=1,3,224 or a bundle",
        ) from error


def _measure_other(run: PreparedRun, steady_s: float) -> float:
    run.answer()
    return float(_measure_steady(run, steady_s)["steady_ms"])


def _measure_steady(run: PreparedRun, steady_s: float) -> dict[str, Any]:
    import numpy as np

    times: list[float] = []
    end = time.perf_counter() + steady_s
    while len(times) < _MIN_RUNS or (time.perf_counter() < end and len(times) < _MAX_RUNS):
        times.append(_time(run.answer)[0])
    return {"steady_ms": float(np.median(times)), "runs": len(times)}


def _read_memory(session: onnxruntime.InferenceSession, gpu: str | None) -> dict[str, Any]:
    on_gpu = gpu is not None and CUDA in session.get_providers()
    return {
        "private_mb": private_bytes() / _MB,
        "peak_mb": peak_rss_bytes() / _MB,
        "gpu_bytes": used_gpu_bytes(gpu) if on_gpu and gpu is not None else None,
    }


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_gpu_bytes(uuid: str) -> int | None:
    """Returns the memory in use on a GPU, by all processes together.

    A container often cannot see its processes' share, so a caller that holds the device to itself takes the
    difference of two readings.

    Returns:
        Bytes, or None where there is no management library or it does not list the GPU.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        return _read_used_bytes(library, uuid)
    finally:
        library.nvmlShutdown()


def _read_used_bytes(library: ctypes.CDLL, uuid: str) -> int | None:
    device, memory = ctypes.c_void_p(), _Memory()
    # CUDA gives a MIG slice's identifier bare; this library needs the kind as a prefix.
    for name in (uuid, uuid.replace("GPU-", "MIG-")):
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) == 0:
            is_read = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            return int(memory.used) if is_read else None
    return None
