"""Processes that see one GPU each, as a pool's workers do: CUDA in them never touches the others."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.bundle.session_record import SessionPlan
from pipeline.runtime.loading.session import CUDA, with_device
from pipeline.runtime.pool.devices import Device
from pipeline.runtime.pool.workplaces import plan_workplaces


def isolate(plan: SessionPlan) -> tuple[SessionPlan, Mapping[str, str]]:
    """Returns a plan, and the environment of a process in which it is the same plan on the only GPU.

    Args:
        plan: Of this process, whose `CUDA_VISIBLE_DEVICES` is honoured; one for the CPU stays as it is.
    """
    cuda = next((provider for provider in plan.providers if provider.name == CUDA), None)
    if cuda is None:
        return plan, {}
    (place,) = plan_workplaces(
        (Device("cuda", int(cuda.options.get("device_id", "0"))),),
        workers_per_device=1,
        processors=(0,),
        nodes=(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    return with_device(plan, place.device_id or 0), place.environment
