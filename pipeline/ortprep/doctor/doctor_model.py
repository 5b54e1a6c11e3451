"""The model that a check examines, how it is loaded on a device (`cpu` or `cuda:<ordinal>`), and measured."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import LoadError
from ortprep.measuring.device_lock import CPU_DEVICE, measuring
from ortprep.quoting import quoted
from ortprep.runtime.loading.load_options import LoadOptions
from ortprep.runtime.loading.session import CUDA, default_plan
from ortprep.runtime.loading.variant_resolver import build_plan
from ortprep.runtime.loading.variant_selection import Machine, select_variant
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.versions import installed_onnxruntime

log = logging.getLogger(__name__)

DEFAULT, PREPARED = "default", "prepared"
"""The source in plain ONNX Runtime, and its bundle."""

CHILD_TIMEOUT_S = 6 * 3600.0
"""Timeout of a process that loads a model, in seconds."""

PREPARE = "ortprep prepare   (with a spec of the model in configs/: ortprep schema, docs/spec.md)"
"""The first step for a model without a bundle."""


@dataclass(frozen=True)
class DoctorModel:
    """A model under examination: a source or a bundle.

    Attributes:
        name: Name of the model, for people.
        sample: `.npz` file with one array per input, by its name.
        path: The ONNX model, or the folder of the bundle.
        is_bundle: Whether it is a bundle.
    """

    name: str
    sample: str
    path: Path
    is_bundle: bool = False


def guard_device(device: str) -> AbstractContextManager[None]:
    """Holds a device exclusively; warns once if it is not free at once.

    Raises:
        CacheError: The folder of the lock cannot be trusted.
    """
    return measuring(device, on_wait=lambda: log.warning("waiting until other work on %s is over", device))


def plan_on(model: str, device: str) -> SessionPlan:
    """Returns the plan of plain ONNX Runtime on a device."""
    if device == CPU_DEVICE:
        return default_plan(model)
    return default_plan(model, CUDA, provider_options={"device_id": device.removeprefix("cuda:")})


def plan_of(subject: DoctorModel, device: str) -> SessionPlan:
    """Returns how a subject is loaded: a source by plain ONNX Runtime, a bundle as jobs load it.

    That is the first of a bundle's variants that this machine can run on the device.

    Raises:
        LoadError: None of the bundle's variants runs on the device.
        BundleError: The bundle cannot be read.
    """
    if not subject.is_bundle:
        return plan_on(str(subject.path), device)
    bundle = subject.path
    ordinal = None if device == CPU_DEVICE else int(device.removeprefix("cuda:"))
    options = LoadOptions(target="cpu" if ordinal is None else "cuda", device_id=ordinal)
    machine = Machine(read_hardware(), installed_onnxruntime())
    variant = select_variant(read_loader_config(bundle), options, machine).variant
    if variant is None:
        raise LoadError(
            f"no variant for {device}: {bundle}\n  expected one that this machine can run there, got none",
            hint=f"ortprep check {quoted(bundle)}",
        )
    return build_plan(bundle, variant, device_id=ordinal)


def with_threads(plan: SessionPlan, count: int) -> SessionPlan:
    """Returns a plan with a number of threads for its operators."""
    attributes = {**plan.session_options.attributes, "intra_op_num_threads": count}
    return plan._replace(session_options=plan.session_options._replace(attributes=attributes))
