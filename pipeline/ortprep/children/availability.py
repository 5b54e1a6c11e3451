"""Can this machine run what is prepared for a target? Asked of ONNX Runtime itself, by making a session."""

from __future__ import annotations

import base64
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import PREFIX, digest_json
from ortprep.bundle.file_memory import cache_folder, read_entry, write_entry
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, ProviderError
from ortprep.runtime.loading.session import CUDA, build_session, default_plan
from ortprep.runtime.machine.hardware import hardware_fingerprint, read_hardware

_TIMEOUT_S = 300.0
_MAX_ENTRY_BYTES = 1 << 16

# One node `y = Add(x, x)` on two floats: a model that every provider runs, as ONNX writes it.
_MODEL = base64.b64decode(
    "CAg6OQoOCgF4CgF4EgF5IgNBZGQSBWdyYXBoWg8KAXgSCgoICAESBAoCCAJiDwoBeRIKCggIARIECgIIAkIECgAQEQ=="
)

_LIBRARY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
_LIBRARY_INDEX = Path("/etc/ld.so.cache")


def unavailable_reason(target: str) -> str | None:
    """Returns why this machine cannot run what is prepared for a target, None if it can.

    ONNX Runtime lists CUDA whether or not its libraries are there, so the answer comes from a session that
    really runs, in a child process. It is remembered on disk until the GPUs, the driver, ONNX Runtime or the
    libraries it may find change; only what else may go wrong, as a full GPU, is asked every time.

    Args:
        target: `cpu` or `cuda`.
    """
    if target == "cpu":
        return None
    if target != "cuda":
        return f"unknown target {target!r}"
    if not read_hardware().gpus:
        return "no CUDA device or driver"
    folder = cache_folder("availability")
    entry = None if folder is None else f"{folder}/{digest_json(_conditions()).removeprefix(PREFIX)}"
    remembered = read_entry(entry, max_bytes=_MAX_ENTRY_BYTES)
    if remembered is not None:
        return remembered.decode(errors="replace") or None
    failure: PipelineError | None = None
    try:
        run_child(run_tiny_model, CUDA, timeout_s=_TIMEOUT_S)
    except PipelineError as error:
        failure = error
    reason = None if failure is None else _explain(target, failure)
    if failure is None or isinstance(failure, ProviderError):
        with suppress(OSError):  # a second next time; the answer stands
            write_entry(entry, (reason or "").encode()[:_MAX_ENTRY_BYTES])
    return reason


def run_tiny_model(provider: str) -> None:
    """Makes and runs a session on one node; runs in a child."""
    import numpy as np

    with scratch_folder("ortprep-available-") as folder:
        model = folder / "add.onnx"
        model.write_bytes(_MODEL)
        session = build_session(default_plan(str(model), provider))
        session.run(None, {"x": np.ones(2, np.float32)})


def _explain(target: str, error: PipelineError) -> str:
    # The first line names the tiny model, which is not the user's.
    detail = error.message.partition("\n")[2] or error.message
    return f"ONNX Runtime cannot make a {target} session: {' '.join(detail.split())}"


def _conditions() -> dict[str, Any]:
    """Everything that decides the answer, as far as it can be seen without importing ONNX Runtime."""
    return {
        "hardware": hardware_fingerprint("cuda")["gpus"],
        "python": sys.executable,
        "onnxruntime": _modified("onnxruntime"),
        "wheels": _modified("nvidia"),
        "libraries": _LIBRARY_INDEX.stat().st_mtime_ns if _LIBRARY_INDEX.exists() else None,
        "environment": {name: os.environ.get(name) for name in _LIBRARY_VARIABLES},
    }


def _modified(package: str) -> list[list[str | int]]:
    """Returns when the folders of an installed package were last changed, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [[folder, Path(folder).stat().st_mtime_ns] for folder in folders if Path(folder).is_dir()]
