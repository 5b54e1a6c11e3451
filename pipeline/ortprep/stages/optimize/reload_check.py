"""Loads and runs a written model in a fresh process, as jobs will."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import RunFailedError
from ortprep.runtime.loading.session import build_session, onnxruntime_errors
from ortprep.runtime.tensors.arrays import fit_feeds, half_inputs, run_session
from ortprep.runtime.tensors.element_types import Array, dtype_name
from ortprep.spec.models import InputSpec, ModelSpec
from ortprep.stages.core.inputs.agreement import fits_shape, shape_sets
from ortprep.stages.core.inputs.sample_files import find_sample_files, fits_interface
from ortprep.stages.core.inputs.samples import build_feeds, read_sample
from ortprep.stages.core.results import ModelInterface

_SEED = 0
"""Not the spec's: another seed is a reason to verify again, not to optimise again."""

_SHOWN = 4
"""How many values of an input an error shows."""


@dataclass(frozen=True)
class ReloadRequest:
    """What to load and what to feed it with; `location` is the folder of the spec."""

    plan: SessionPlan
    spec: ModelSpec
    location: Path
    interface: ModelInterface


def run_reload(plan: SessionPlan, spec: ModelSpec, interface: ModelInterface) -> None:
    """Loads a model as a job would and runs it once; whether its answers are right is for `verify` to say.

    The run is needed: a graph that is laid out for another processor loads well and fails in its first run
    (microsoft/onnxruntime #26174).

    Raises:
        LoadError: It does not load.
        RunFailedError: It does not run; the message has what it was fed.
        SpecError: There is nothing to feed it with.
        ChildError: The process died, or took longer than the spec's deadline.
    """
    request = ReloadRequest(plan, spec, spec.folder.resolve(), interface)
    run_child(reload, request, timeout_s=spec.optimize.timeout_s)


def reload(request: ReloadRequest) -> None:
    """Child function of `run_reload`, which has its errors."""
    spec = request.spec.located_in(request.location)
    session = build_session(request.plan)
    chosen, origin = _choose_feeds(spec, request.interface)
    try:
        run_session(session, fit_feeds(chosen, half_inputs(session)))
    except onnxruntime_errors() as error:
        fed = "\n  ".join(_describe_feeds(spec, chosen, origin))
        raise RunFailedError(
            f"loads, but does not run: {request.plan.model}\n  {type(error).__name__}: {error}\n  {fed}"
        ) from error


def _choose_feeds(spec: ModelSpec, interface: ModelInterface) -> tuple[dict[str, Array], Path | None]:
    """Takes the user's first sample that fits, or makes an input of the first declared shapes that do.

    Returns:
        Arrays by input name, and the sample's file; None for an input that was made.
    """
    for sample in find_sample_files(spec):
        if fits_interface(sample, interface):
            return read_sample(sample, interface), sample
    sets = shape_sets(spec, interface)
    # A model that is bound to some shapes takes no others; where none is declared, the run says so.
    fitting = [
        shapes for shapes in sets if all(fits_shape(item, shapes[item.name]) for item in interface.inputs)
    ]
    return build_feeds(interface, (fitting or sets)[0], spec, seed=_SEED), None


def _describe_feeds(spec: ModelSpec, feeds: Mapping[str, Array], origin: Path | None) -> Iterator[str]:
    for name, array in feeds.items():
        declared = spec.inputs.get(name, InputSpec())
        if origin is not None:
            source = f"from {origin}"
        elif declared.values is not None or declared.range is not None:
            source = "values as declared" if declared.values is not None else "range as declared"
        else:
            source = "values made up"
        numbers = ", ".join(str(value) for value in array.reshape(-1)[:_SHOWN])
        more = ", …" if array.size > _SHOWN else ""
        yield f"{name}: {dtype_name(array.dtype)} {list(array.shape)}, {source}: {numbers}{more}"
