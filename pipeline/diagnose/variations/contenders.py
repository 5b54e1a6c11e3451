"""The ways to load a model that are compared, and the files that some of them need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.diagnose.subject import Subject, plan_of_bundle, plan_on
from pipeline.errors import PipelineError
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.options.external_data import with_external_data
from pipeline.runtime.child import run_child
from pipeline.runtime.session import SessionPlan, build_session

DEFAULT = "default"

_TIMEOUT_S = 3600.0
_NO_PREPACKING = {"session.disable_prepacking": "1"}
_HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}


@dataclass(frozen=True)
class Contender:
    """A way to load a model.

    Attributes:
        name: In a word or two.
        what: What it does otherwise than the default.
        plan: How its session is made.
    """

    name: str
    what: str
    plan: SessionPlan


def build_contenders(
    subject: Subject, device: str, folder: Path
) -> tuple[tuple[Contender, ...], Mapping[str, str]]:
    """Returns the ways to load a model, the default first, and those that cannot be tried, with the reason.

    Args:
        subject: The model.
        device: `cpu` or `cuda:<ordinal>`.
        folder: Where optimised copies of the source are written.

    Raises:
        BundleError: The bundle cannot be read.
        LoadError: None of its variants is for the device.
    """
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    if subject.source is not None:
        contenders += _of_source(subject.source, device)
        for name, external in (("optimised", False), ("mapped", True)):
            try:
                written = _write(subject.source, device, folder / f"{name}.onnx", external=external)
            except PipelineError as error:
                skipped[name] = error.message
            else:
                contenders += _of_optimised(written, device, mapped=external)
    if subject.bundle is not None:
        plan = plan_of_bundle(Path(subject.bundle), device)
        contenders.append(Contender("prepared", "the bundle, as jobs load it", plan))
    return tuple(contenders), skipped


def _of_source(source: str, device: str) -> Iterator[Contender]:
    yield Contender(DEFAULT, "plain ONNX Runtime, everything optimised at load", plan_on(source, device))
    unoptimised = plan_on(source, device, level="ORT_DISABLE_ALL")
    yield Contender("no optimisation", "the source as it is, ORT_DISABLE_ALL", unoptimised)
    if device != CPU_DEVICE:
        plan = plan_on(source, device, provider_options=_HEURISTIC)
        yield Contender("heuristic", "cudnn_conv_algo_search=HEURISTIC", plan)


def _of_optimised(model: Path, device: str, *, mapped: bool) -> Iterator[Contender]:
    plan = plan_on(str(model), device, level="ORT_DISABLE_ALL")
    if not mapped:
        yield Contender("optimised", "optimised graph, weights inside, ORT_DISABLE_ALL", plan)
        return
    yield Contender("mapped", "optimised graph, weights in a mapped file, ORT_DISABLE_ALL", plan)
    unpacked = plan_on(str(model), device, level="ORT_DISABLE_ALL", config_entries=_NO_PREPACKING)
    yield Contender("mapped, no prepacking", "the same with session.disable_prepacking=1", unpacked)


def _write(source: str, device: str, model: Path, *, external: bool) -> Path:
    request = {"plan": encode(_writing_plan(source, device, model, external=external))}
    run_child(f"{__name__}:write_optimised", request, timeout_s=_TIMEOUT_S)
    return model


def _writing_plan(source: str, device: str, model: Path, *, external: bool) -> SessionPlan:
    entries = {**_NO_PREPACKING, **(with_external_data(model) if external else {})}
    plan = plan_on(source, device, config_entries=entries)
    options = dataclasses.replace(plan.session_options, attributes={"optimized_model_filepath": str(model)})
    return dataclasses.replace(plan, session_options=options)


def write_optimised(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the session that writes an optimised model; runs in a child.

    Args:
        request: `plan`, with the file that it writes.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    build_session(decode(SessionPlan, request["plan"]))
    return {}
