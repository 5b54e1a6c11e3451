"""The device that Ray gave a process: its GPU, or the processors that are reserved for it."""

from __future__ import annotations

import os
import sys
from typing import Any

from ortprep.errors import PoolError


def prepare_device(device: str = "auto") -> bool:
    """Says whether to load for a GPU; in an actor, hides GPUs that Ray gave to others.

    Call it before anything imports ONNX Runtime, which looks for GPUs then.

    Raises:
        PoolError: It is to be a GPU, and Ray gave the process none, or several.
    """
    context = _context()
    gpus = () if context is None else context.get_accelerator_ids().get("GPU", ())
    on_gpu = device == "cuda" or (device == "auto" and bool(gpus))
    if context is None:
        return on_gpu
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if on_gpu and len([name for name in (visible or "").split(",") if name.strip()]) != 1:
        raise PoolError(
            f"a process for a GPU was given none of its own\n"
            f"  expected one device in CUDA_VISIBLE_DEVICES, got {visible!r}",
            hint="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        )
    if context.get_actor_id() is not None:  # the process of a task goes on to others
        # Without GPUs to see, a bundle that prefers CUDA would take another's.
        os.environ.update({"CUDA_MODULE_LOADING": "LAZY"} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    return on_gpu


def reserved_cpus() -> int | None:
    """Returns how many processors Ray reserved for this actor or task, at least one; None outside of both."""
    context = _context()
    return None if context is None else max(1, int(context.get_assigned_resources().get("CPU", 1)))


def _context() -> Any:
    """Returns the context of the Ray actor or task that this runs in; None outside of both."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context if getattr(context.worker, "mode", None) == ray.WORKER_MODE else None
