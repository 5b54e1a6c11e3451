"""Can this machine run what is prepared for a target? Asked of ONNX Runtime itself, by making a session."""

from __future__ import annotations

import base64
import functools

from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children.child import run_child
from ortprep.errors import PipelineError
from ortprep.runtime.loading.session import CUDA, build_session, default_plan
from ortprep.runtime.machine.hardware import read_hardware

_TIMEOUT_S = 300.0

# One node `y = Add(x, x)` on two floats: a model that every provider runs, as ONNX writes it.
_MODEL = base64.b64decode(
    "CAg6OQoOCgF4CgF4EgF5IgNBZGQSBWdyYXBoWg8KAXgSCgoICAESBAoCCAJiDwoBeRIKCggIARIECgIIAkIECgAQEQ=="
)


@functools.cache
def unavailable_reason(target: str) -> str | None:
    """Returns why this machine cannot run what is prepared for a target, None if it can.

    ONNX Runtime lists CUDA whether or not its libraries are there, so the answer comes from a session that
    really runs, in a child process, once per process.

    Args:
        target: `cpu` or `cuda`.
    """
    if target == "cpu":
        return None
    if target != "cuda":
        return f"unknown target {target!r}"
    if not read_hardware().gpus:
        return "no CUDA device or driver"
    try:
        run_child(run_tiny_model, CUDA, timeout_s=_TIMEOUT_S)
    except PipelineError as error:
        # The first line names the tiny model, which is not the user's.
        detail = error.message.partition("\n")[2] or error.message
        return f"ONNX Runtime cannot make a {target} session: {' '.join(detail.split())}"
    return None


def run_tiny_model(provider: str) -> None:
    """Makes and runs a session on one node; runs in a child."""
    import numpy as np

    with scratch_folder("ortprep-available-") as folder:
        model = folder / "add.onnx"
        model.write_bytes(_MODEL)
        session = build_session(default_plan(str(model), provider))
        session.run(None, {"x": np.ones(2, np.float32)})
