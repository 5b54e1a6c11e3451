"""Runs a model on the proposed inputs in a child process, and on what each failure suggests."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children.child import run_child
from ortprep.errors import ChildError, LoadError, PipelineError, SourceError, SpecError, require_known
from ortprep.init.graph_facts import read_facts
from ortprep.init.input_search import Feed, InputSearch, ObservedInput
from ortprep.measuring.feeds import draw_feed, generator
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import (
    build_session,
    default_plan,
    import_onnxruntime,
    onnxruntime_errors,
)
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.arrays import run_session, write_tensors
from ortprep.runtime.tensors.element_types import Array
from ortprep.spec.fields import MAX_DIMENSION
from ortprep.spec.models import VerifySpec
from ortprep.stages.core.results import plain_refusal
from ortprep.stages.core.spec_fit import unsupported_tensors
from ortprep.stages.fetch.zip_map import drop_zip_maps

TIMEOUT_S = 600.0
"""Timeout of running a model until it runs, in seconds."""

_MAX_ERROR = 600
_MAX_MESSAGE = 4000  # what is read for sizes; a model can have names of megabytes
_MAX_TRIED = 12
_MEMORY_SHARE = 0.75
_MAX_ELEMENTS = 2**24


@dataclass(frozen=True)
class InitTrial:
    """Result of running a model on proposed inputs.

    Attributes:
        facts: Description of the model's file.
        changes: Outputs that lost their `ZipMap` before it ran, a line each.
        feeds: Inputs it ran on, or those that came furthest.
        error: Last message of ONNX Runtime, in one line; "" if it ran.
        tried: Shapes, by input, of the first attempts that failed, in order.
        attempts: Number of runs.
        load_s: Seconds that making the session took, without optimisation.
        run_s: Seconds of one run, without optimisation; 0 if it did not run.
        onnxruntime: Version that ran it.
    """

    facts: ModelFacts
    changes: tuple[str, ...]
    feeds: Mapping[str, Feed]
    error: str
    tried: tuple[Mapping[str, tuple[int, ...]], ...]
    attempts: int
    load_s: float
    run_s: float
    onnxruntime: str


def try_inputs(model: Path, observed: Mapping[str, ObservedInput], *, may_drop_zip_map: bool) -> InitTrial:
    """Reads a model, and runs it in a child process until it runs or nothing is left to try.

    Args:
        model: The ONNX file.
        observed: Known inputs, by name.
        may_drop_zip_map: Whether a model that ends with a `ZipMap` runs without it.

    Raises:
        SourceError: It is not a model, no spec can describe it, or ONNX Runtime makes no session of it.
        SpecError: An observed input is none of the model's.
        ChildTimeoutError: The deadline passed.
        MissingExtraError: ONNX Runtime cannot be imported.
    """
    import_onnxruntime()  # a child could only report a crash without it
    # Sizes that need more fail, and smaller ones are tried, before the kernel ends a process.
    memory_bytes = int(_MEMORY_SHARE * read_hardware(gpus=False).memory_bytes)
    try:
        with scratch_folder("ortprep-init-") as scratch:
            request = model, scratch / "model.onnx" if may_drop_zip_map else None, observed
            return run_child(run_trial, request, timeout_s=TIMEOUT_S, memory_bytes=memory_bytes).value
    except LoadError as error:
        reason = plain_refusal(error.message)
        raise SourceError(f"ONNX Runtime does not accept the model: {model}\n  {reason}") from error
    except ChildError as error:
        raise type(error)(f"cannot run the model: {model}\n  {error.message}", hint=error.hint) from error


def write_sample(model: Path, sample: Path, observed: Mapping[str, ObservedInput]) -> Mapping[str, Feed]:
    """Writes inputs that a model runs on, as the `.npz` file `sample`; returns their shapes and values.

    Raises:
        SpecError: None was found, or an observed input is none of the model's.
        SourceError: It is not a model, no spec can describe it, or ONNX Runtime makes no session of it.
        ChildTimeoutError: The deadline passed.
        OSError: The file cannot be written.
    """
    trial = try_inputs(model, observed, may_drop_zip_map=False)
    if trial.error:
        raise SpecError(
            f"found no input that the model runs on: {model}\n  {trial.error}",
            hint=f"ortprep doctor init {quoted(model)} --shape NAME=1,3,224,224",
        )
    write_tensors(sample, draw_inputs(trial.facts.interface, trial.feeds))
    return trial.feeds


def run_trial(request: tuple[Path, Path | None, Mapping[str, ObservedInput]]) -> InitTrial:
    """Child function of `try_inputs`: the model, a file for it without its `ZipMap`, and known inputs.

    Raises:
        LoadError: ONNX Runtime does not make a session of the model.
    """
    import onnxruntime

    path, written, observed = request
    facts, changes = read_facts(path), tuple[str, ...]()
    makes_sequences = any(one.dtype.startswith("sequence(") for one in facts.model.interface.outputs)
    place = path
    if written is not None and makes_sequences and not facts.model.external:
        changes = drop_zip_maps((path, written))
        if changes:
            place, facts = written, read_facts(written)
    check_inputs(facts.model.interface, observed, path)

    started = time.perf_counter()
    model = _TrialModel(str(place), facts.model.interface)
    load_s = time.perf_counter() - started
    search = InputSearch(facts, observed, model.run)
    best = search.find()
    run_s = 0.0
    if not best.error:
        started = time.perf_counter()
        run_session(model.session, draw_inputs(facts.model.interface, best.feeds))
        run_s = time.perf_counter() - started
    failed = [one.feeds for one in search.attempts if one.error][:_MAX_TRIED]
    return InitTrial(
        facts=facts.model,
        changes=changes,
        feeds=best.feeds,
        error=plain_refusal(best.error)[:_MAX_ERROR],
        tried=tuple({name: feed.shape for name, feed in feeds.items()} for feeds in failed),
        attempts=len(search.attempts),
        load_s=load_s,
        run_s=run_s,
        onnxruntime=onnxruntime.__version__,
    )


def check_inputs(interface: ModelInterface, known: Collection[str], model: Path) -> None:
    """Refuses what no spec can describe, and names of inputs that the model lacks.

    Raises:
        SourceError: An input or output is no tensor, an axis of an input is too long, or there is no output.
        SpecError: No input has a name that is known.
    """
    problem = next(unsupported_tensors(interface), "")
    if not interface.outputs:
        problem = "model without outputs, expected at least one"
    for item in interface.inputs:
        largest = max((axis for axis in item.shape or () if isinstance(axis, int)), default=0)
        if largest > MAX_DIMENSION:
            problem = f"input too large: {item.name!r}, expected up to {MAX_DIMENSION}, got {largest}"
    if problem:
        raise SourceError(
            f"no spec can describe the model: {model}\n  {problem}",
            hint="use the model without ortprep, or export it with tensors of bounded sizes only",
        )
    names = [item.name for item in interface.inputs]
    for name in known:
        require_known(f"input of {model}", name, names, hint=lambda _: f"ortprep init {quoted(model)}")


def draw_inputs(interface: ModelInterface, feeds: Mapping[str, Feed]) -> dict[str, Array]:
    """Returns the seeded arrays that a build draws for such a spec."""
    return {
        item.name: draw_feed(
            item,
            feeds[item.name].shape,
            generator(VerifySpec().seed, item.name),
            span=feeds[item.name].values.range,
            values=feeds[item.name].values.values,
            bound=interface.index_bounds.get(item.name),
        )
        for item in interface.inputs
    }


class _TrialModel:
    """A model's session without optimisation, which names the graph's own nodes when a run fails."""

    def __init__(self, path: str, interface: ModelInterface) -> None:
        self._interface = interface
        self._max_elements = sys.maxsize
        # Errors are read from exceptions.
        quiet = {"log_severity_level": 4}
        self.session = build_session(default_plan(path, level="ORT_DISABLE_ALL", attributes=quiet))

    def run(self, feeds: Mapping[str, Feed]) -> str:
        """Runs once on seeded values; returns the error, "" for none."""
        largest = max((math.prod(feed.shape) for feed in feeds.values()), default=0)
        if largest > self._max_elements:
            return f"an input of {largest} elements was not tried"
        # What is proposed first is tried at any size: the graph may ask for it.
        self._max_elements = min(max(largest, _MAX_ELEMENTS), self._max_elements)
        refusals: tuple[type[Exception], ...] = (*onnxruntime_errors(), MemoryError, PipelineError)
        try:
            run_session(self.session, draw_inputs(self._interface, feeds))
        except refusals as error:
            return str(error)[:_MAX_MESSAGE] or type(error).__name__
        return ""
