"""Does a written model load and run where jobs will run it? Answered in a fresh process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.bundle.session_record import SessionPlan
from pipeline.errors import StageError
from pipeline.runtime.child import run_child
from pipeline.runtime.element_types import Array
from pipeline.runtime.loading.session import build_session, onnxruntime_errors
from pipeline.runtime.tensors import fit_feeds, half_inputs, run_session
from pipeline.spec.models import ModelSpec
from pipeline.stages.inputs.agreement import shape_sets
from pipeline.stages.inputs.feeds import build_feeds
from pipeline.stages.inputs.sample_files import find_sample_files, fits_interface, fits_shape
from pipeline.stages.inputs.samples import read_sample
from pipeline.stages.results import ModelInterface

_SEED = 0
"""Not the spec's: another seed is a reason to verify again, not to optimise again."""


def run_reload(plan: SessionPlan, spec: ModelSpec, interface: ModelInterface) -> None:
    """Loads a model as a job would and runs it once; whether its answers are right is for `verify` to say.

    The run is needed: a graph that is laid out for another processor loads well and fails in its first run
    (microsoft/onnxruntime #26174).

    Args:
        plan: How jobs load it.
        spec: The model; what it is fed, and the deadline.
        interface: Its inputs.

    Raises:
        LoadError: It does not load.
        StageError: It does not run.
        SpecError: There is nothing to feed it with.
        ChildError: The process died, or took longer than the spec's deadline.
    """
    request = {
        "plan": encode(plan),
        "spec": spec.model_dump(mode="json"),
        "location": str(spec.folder.resolve()),
        "interface": encode(interface),
    }
    run_child("pipeline.stages.optimize.reloading:reload", request, timeout_s=spec.optimize.timeout_s)


def reload(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `run_reload`.

    Raises:
        LoadError: The model does not load.
        StageError: It does not run.
        SpecError: There is nothing to feed it with.
    """
    plan = decode(SessionPlan, request["plan"])
    spec = ModelSpec.model_validate(request["spec"]).located_in(Path(request["location"]))
    session = build_session(plan)
    feeds = fit_feeds(_choose_feeds(spec, decode(ModelInterface, request["interface"])), half_inputs(session))
    try:
        run_session(session, feeds)
    except onnxruntime_errors() as error:
        raise StageError(
            f"loads, but does not run: {plan.model}\n  {type(error).__name__}: {error}"
        ) from error
    return {}


def _choose_feeds(spec: ModelSpec, interface: ModelInterface) -> dict[str, Array]:
    """Takes the user's first sample that fits, or makes an input of the first declared shapes that do."""
    for sample in find_sample_files(spec):
        if fits_interface(sample, interface):
            return read_sample(sample, interface)
    sets = shape_sets(spec, interface)
    # A model that is bound to some shapes takes no others; where none is declared, the run says so.
    fitting = [one for one in sets if all(fits_shape(item, one[item.name]) for item in interface.inputs)]
    return build_feeds(interface, (fitting or sets)[0], spec, seed=_SEED)
