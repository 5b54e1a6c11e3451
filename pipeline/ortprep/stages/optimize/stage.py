"""`optimize`: one optimising session on the target's provider writes the graph that jobs load.

What was written is linted and loaded in a fresh process; on a hazard or a failure the next step is
tried, down to the source itself, and the record says why.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.conversion_record import computes_with_integers
from ortprep.bundle.file_links import share_model
from ortprep.bundle.loader_config import SOURCE_PRECISION, Requirements, Variant
from ortprep.bundle.manifest import LadderAttempt
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.children.answers import write_answers
from ortprep.children.child import run_child
from ortprep.errors import (
    ChildKilledError,
    LoadError,
    StageError,
    hint_of_os_error,
)
from ortprep.quoting import quoted
from ortprep.runtime.machine.hardware import hardware_fingerprint, read_hardware
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId, target_of
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import (
    REFUSALS,
    TAKEN,
    Graph,
    PreparedResult,
    describe_failures,
    plain_refusal,
    read_source,
    source_task,
)
from ortprep.stages.core.sample_files import find_sample_files, inputs_key, samples_key
from ortprep.stages.core.samples import draw_sample
from ortprep.stages.core.spec_fit import require_fit
from ortprep.stages.optimize.graph_writer import SaveRequest, SaveResult, save_optimized
from ortprep.stages.optimize.requirements import derive_requirements
from ortprep.stages.optimize.session_plans import (
    Step,
    loading_options,
    loading_providers,
    plan_steps,
    runtime_key,
    saving_plan,
)

_ATTEMPT = ".attempt"


class OptimizeStage:
    """Writes the prepared graph of one variant."""

    name = "optimize"
    version = 7

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the targets and the portable variant."""
        return plan.variants

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the graph that the variant is made of."""
        return (source_task(plan, variant),)

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what decides the graph: options, ONNX Runtime, this machine, and the input of its run."""
        spec, target = plan.spec, target_of(plan, variant)
        hardware, samples = hardware_fingerprint(target), samples_key(spec)
        return {
            "name": spec.name,
            "optimize": spec.optimize.model_dump(mode="json", exclude={"timeout_s"}),
            "runtime": runtime_key(spec.runtime, target),
            "inputs": inputs_key(spec),
            "sample": samples[0] if samples else None,
            "tools": runtime_versions(target, "onnx"),
            # How many cores there are changes how fast a graph runs, not how it is optimised.
            "hardware": {name: value for name, value in hardware.items() if name != "cores"},
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Tries one step after the other until a file is written that lints clean, loads and runs.

        Raises:
            StageError: Not even the source runs (the message has each step's reason), or the disk is full.
            SpecError: The spec does not fit the model.
            BundleError: The first sample cannot be read.
            OSError: The disk is full.
        """
        spec, graph = context.spec, read_source(context)
        if graph.conversion is None:
            require_fit(spec, graph.description.interface)
        attempts: list[LadderAttempt] = []
        for step in plan_steps(role_of(context), level=spec.optimize.level):
            tried, saved = try_step(context, step)
            attempts.append(tried)
            if saved is not None:
                return dict(encode(_result_of(context, step, saved, tuple(attempts))))
            # A full disk passes; a model that was optimised less because of it would stay so.
            _require_disk_space(context.folder.resolve(), graph)
            context.say(f"step {step.name!r} failed: {tried.outcome.splitlines()[0]}")
        failures = describe_failures((tried.step, tried.outcome) for tried in attempts)
        raise StageError(
            f"every step of the optimisation failed: {context.variant} of {spec.name}\n{failures}",
            hint=f"ORTPREP_LOG=debug ortprep prepare {quoted(spec.name)}   (what ONNX Runtime said)",
        )


def _require_disk_space(folder: Path, graph: Graph) -> None:
    """Reserves a file of the source's size for a moment: quotas and limits count, which no free figure shows.

    Raises:
        StageError: It does not fit.
    """
    size_bytes = sum(entry.size_bytes for entry in graph.description.source.files)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        raise StageError(
            f"no room for the optimised model in {folder}\n"
            f"  expected {size_bytes} bytes, got none: {error.strerror}",
            hint=hint_of_os_error(error, str(folder)),
        ) from error


def _result_of(
    context: Context, step: Step, saved: SaveResult, attempts: tuple[LadderAttempt, ...]
) -> PreparedResult:
    """Returns how jobs load what a step wrote."""
    spec, plan, conversion = context.spec, context.variant_plan, read_source(context).conversion
    options = loading_options(spec.runtime, level=step.loading_level)
    providers = loading_providers(spec.runtime, role_of(context))
    precision = SOURCE_PRECISION if conversion is None else conversion.precision
    variant = Variant(
        name=plan.name,
        target=plan.target,
        model=model_name(spec),
        files=(),
        session_options=options,
        providers=providers,
        requirements=requirements_of(context, saved, options, providers),
        precision=precision,
    )
    return PreparedResult(variant, step.name, attempts, saved.onnxruntime)


def role_of(context: Context) -> str:
    """Returns what a task's variant is written for: `portable`, or the target that it runs on."""
    return PORTABLE if context.variant == PORTABLE else context.target


def model_name(spec: ModelSpec) -> str:
    """Returns the name of the model file that is written."""
    return f"{spec.name}_optimized.onnx"


def try_step(context: Context, step: Step) -> tuple[LadderAttempt, SaveResult | None]:
    """Makes the file as the step says; puts it in place if it holds, and leaves nothing of it if not."""
    place, graph, spec, role = context.folder.resolve(), read_source(context), context.spec, role_of(context)
    folder, saved = place / _ATTEMPT, None
    try:
        folder.mkdir()
        model, runtime = folder / model_name(spec), spec.runtime
        if step.level is None:
            share_model(graph.path, model)  # external data keeps the names that the model gives it
        writer = saving_plan(runtime, role, step, source=graph.path, model=model)
        saved = save_and_describe(context, folder, writer)
        # The source is the last step, so its hazards do not matter.
        outcome = "\n  ".join(saved.hazards) if step.level is not None else ""
        if not outcome:
            options = loading_options(runtime, level=step.loading_level)
            reader = SessionPlan(str(model), options, loading_providers(runtime, role))
            _require_run(context, reader)
            for path in sorted(folder.iterdir()):
                path.rename(place / path.name)
            outcome = TAKEN
    except ChildKilledError:
        # Says nothing about the step: a lesser graph must not result from a moment without memory.
        raise
    except REFUSALS as error:
        outcome = plain_refusal(error.message) if isinstance(error, LoadError) else error.message
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LadderAttempt(step.name, outcome), saved if outcome == TAKEN else None


def _require_run(context: Context, plan: SessionPlan) -> None:
    """Loads a model as a job would and runs it once; whether its answers are right is for `verify` to say.

    The run is needed: a graph that is laid out for another processor loads well and fails in its first run
    (microsoft/onnxruntime #26174). It is fed with the user's first sample, or with a drawn one.

    Raises:
        LoadError: It does not load.
        StageError: It does not run.
        SpecError: A string input has no `values`.
        BundleError: The sample cannot be read.
        OSError: There is no room for its answers.
        ChildError: The process died, or took longer than the spec's deadline.
    """
    spec, interface = context.spec, read_source(context).description.interface
    with tempfile.TemporaryDirectory(prefix=".run-", dir=context.folder) as scratch:
        real = find_sample_files(spec)
        sample = real[0] if real else draw_sample(spec, interface, Path(scratch, "sample.npz")).path
        write_answers(plan, [sample], Path(scratch, "answers"), timeout_s=spec.optimize.timeout_s)


def save_and_describe(context: Context, folder: Path, plan: SessionPlan | None) -> SaveResult:
    """Has a child make the session that writes a file, and returns what is in it.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
        ChildError: The child died.
    """
    description = read_source(context).description
    request = SaveRequest(
        folder / model_name(context.spec),
        plan,
        role_of(context),
        inputs=tuple(tensor.name for tensor in description.interface.inputs),
        operators=tuple(description.source.operators),
    )
    return run_child(save_optimized, request, timeout_s=context.spec.optimize.timeout_s).value


def requirements_of(
    context: Context,
    saved: SaveResult,
    options: SessionOptionsRecord,
    providers: tuple[ProviderRecord, ...],
) -> Requirements:
    """Returns what a machine needs for a written file that is loaded with those options."""
    role = role_of(context)
    on_gpu = role == "cuda"
    return derive_requirements(
        saved,
        options,
        providers,
        portable=role == PORTABLE,
        hardware=read_hardware(gpus=on_gpu),
        integers=not on_gpu and computes_with_integers(read_source(context).conversion),
    )
