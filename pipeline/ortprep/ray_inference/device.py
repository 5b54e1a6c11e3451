"""The device that Ray gave a replica: its GPU, or the processors that are reserved for it."""

from __future__ import annotations

import os
import sys
from typing import Any

from ortprep.errors import PoolError


def prepare_device() -> bool:
    """Says whether Ray gave this actor a GPU, and hides the GPUs that it gave to others.

    Call it before anything imports ONNX Runtime, which looks for GPUs then.

    Raises:
        PoolError: The process sees none of its own, or several.
    """
    context = _context()
    if context is None:
        return False
    on_gpu = bool(context.get_accelerator_ids().get("GPU", ()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if on_gpu and len([name for name in (visible or "").split(",") if name.strip()]) != 1:
        raise PoolError(
            f"a process for a GPU was given none of its own\n"
            f"  expected one device in CUDA_VISIBLE_DEVICES, got {visible!r}",
            hint="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        )
    # Without this, a bundle that prefers CUDA would take a GPU that is another's.
    os.environ.update({"CUDA_MODULE_LOADING": "LAZY"} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    return on_gpu


def reserved_cpus() -> int | None:
    """Returns how many processors Ray reserved for this actor, at least one; None outside of one."""
    context = _context()
    return None if context is None else max(1, int(context.get_assigned_resources().get("CPU", 1)))


def _context() -> Any:
    """Returns the context of the Ray actor that this runs in; None outside of one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context if getattr(context.worker, "mode", None) == ray.WORKER_MODE else None
