"""Ways to load a model that are compared, and the files that some of them need."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest
from ortprep.doctor.doctor_model import (
    DEFAULT,
    PREPARED,
    DoctorModel,
    plan_of_bundle,
    plan_on,
    variant_for,
)
from ortprep.errors import PipelineError
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.options import with_external_data
from ortprep.runtime.loading.session import build_session

STEADY_S = 0.2

_TIMEOUT_S = 6 * 3600.0
_FIRST_GPU = "cuda:0"
_NO_PREPACKING = {"session.disable_prepacking": "1"}
_HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}


@dataclass(frozen=True)
class LoadVariation:
    """A way to load a model.

    Attributes:
        name: In a word or two.
        what: What it does otherwise than the default.
        request: What a process of it measures.
    """

    name: str
    what: str
    request: ProbeRequest


def build_variations(
    subject: DoctorModel, device: str, folder: Path
) -> tuple[tuple[LoadVariation, ...], Mapping[str, str]]:
    """Returns the ways to load a model, the default first, and those that cannot be tried, with the reason.

    Raises:
        BundleError: The bundle cannot be read.
        LoadError: None of its variants is for the device.
        OSError: The folder cannot be written to.
    """
    variations: list[LoadVariation] = []
    skipped: dict[str, str] = {}
    if subject.source is not None:
        ways = list(_of_source(subject.source, device))
        try:
            ways += _of_optimised(_write(subject.source, device, folder / "mapped.onnx"), device)
        except PipelineError as error:
            skipped["mapped"] = error.message
        variations += [
            LoadVariation(name, what, ProbeRequest(plan, subject.sample, STEADY_S))
            for name, what, plan in ways
        ]
    if subject.bundle is not None:
        variations.append(_prepared(Path(subject.bundle), device, subject.sample))
    return tuple(variations), skipped


def _prepared(bundle: Path, device: str, sample: str) -> LoadVariation:
    variant = variant_for(bundle, device)
    if device in (CPU_DEVICE, _FIRST_GPU):
        request = ProbeRequest(None, sample, STEADY_S, bundle=str(bundle), target=variant.name)
        what = f"the bundle's {variant.name}, by `load`"
    else:
        request = ProbeRequest(plan_of_bundle(bundle, device), sample, STEADY_S)
        what = f"the session that the bundle's {variant.name} records"
    return LoadVariation(PREPARED, what, dataclasses.replace(request, io_binding=variant.io_binding))


def _of_source(source: str, device: str) -> Iterator[tuple[str, str, SessionPlan]]:
    yield DEFAULT, "plain ONNX Runtime, everything optimised at load", plan_on(source, device)
    unoptimised = plan_on(source, device, level="ORT_DISABLE_ALL")
    yield "no optimisation", "the source as it is, ORT_DISABLE_ALL", unoptimised
    if device != CPU_DEVICE:
        plan = plan_on(source, device, provider_options=_HEURISTIC)
        yield "heuristic", "cudnn_conv_algo_search=HEURISTIC", plan


def _of_optimised(model: Path, device: str) -> Iterator[tuple[str, str, SessionPlan]]:
    plan = plan_on(str(model), device, level="ORT_DISABLE_ALL")
    yield "mapped", "optimised graph, weights in a mapped file, ORT_DISABLE_ALL", plan
    unpacked = plan_on(str(model), device, level="ORT_DISABLE_ALL", config_entries=_NO_PREPACKING)
    yield "mapped, no prepacking", "the same with session.disable_prepacking=1", unpacked


def _write(source: str, device: str, model: Path) -> Path:
    request = {"plan": encode(_writing_plan(source, device, model))}
    run_child(write_optimised, request, timeout_s=_TIMEOUT_S)
    return model


def _writing_plan(source: str, device: str, model: Path) -> SessionPlan:
    entries = {**_NO_PREPACKING, **with_external_data(model)}
    plan = plan_on(source, device, config_entries=entries)
    options = plan.session_options._replace(attributes={"optimized_model_filepath": str(model)})
    return plan._replace(session_options=options)


def write_optimised(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the session that writes an optimised model; runs in a child.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
        OSError: There is no room for it.
    """
    plan = decode(SessionPlan, request["plan"])
    build_session(plan)
    # Else the kernel writes it out while the first rounds are measured.
    model = Path(str(plan.session_options.attributes["optimized_model_filepath"]))
    for file in model.parent.glob(f"{model.name}*"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return {}
