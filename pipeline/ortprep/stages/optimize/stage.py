"""`optimize`: one optimising session on the target's provider writes the graph that jobs load.

What was written is linted and loaded in a fresh process; on a hazard or a failure the next step is
tried, down to the source itself, and the record says why.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import SOURCE_PRECISION, Variant
from ortprep.bundle.manifest import LadderAttempt
from ortprep.errors import (
    ChildError,
    ChildKilledError,
    ChildMemoryError,
    ChildTimeoutError,
    LoadError,
    RunFailedError,
    SourceError,
    StageError,
    hint_of_os_error,
)
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CPU, default_plan
from ortprep.runtime.machine.hardware import hardware_fingerprint
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context, Plan, TaskId, target_of
from ortprep.stages.core.fallback import describe_failures, plain_refusal
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import Graph, PreparedResult, read_source, source_task
from ortprep.stages.core.sample_files import inputs_key, samples_key
from ortprep.stages.core.spec_fit import require_fit
from ortprep.stages.optimize.attempt import model_name, requirements_of, role_of, run_reload, try_step
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.session_plans import (
    Step,
    loading_providers,
    plan_steps,
    runtime_key,
    step_options,
)


class OptimizeStage:
    """Writes the prepared graph of one variant."""

    name = "optimize"
    version = 6

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the targets and the portable variant."""
        return plan.variants

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the graph that the variant is made of."""
        return (source_task(plan, variant),)

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what decides the graph: options, ONNX Runtime, this machine, and what the reload is fed."""
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
            SourceError: ONNX Runtime does not accept the source.
            StageError: Not even the source runs (the message has every step's reason, or what it was fed), or
                the disk is full.
            SpecError: The spec does not fit the model.
        """
        spec, graph, optimize = context.spec, read_source(context), context.spec.optimize
        if graph.conversion is None:
            require_fit(spec, graph.description.interface)
        steps = plan_steps(
            role_of(context), level=optimize.level, disabled_optimizers=optimize.disabled_optimizers
        )
        attempts: list[LadderAttempt] = []
        for step in steps:
            tried, saved = try_step(context, step)
            attempts.append(tried)
            if saved is not None:
                return dict(encode(_result_of(context, step, saved, tuple(attempts))))
            if step == steps[0] and graph.conversion is None:
                _require_usable_source(spec, graph)
            # A full disk passes; a model that was optimised less because of it would stay so.
            _require_disk_space(context.folder.resolve(), graph)
            context.say(f"step {step.name!r} failed: {tried.outcome.splitlines()[0]}")
        failures = describe_failures((tried.step, tried.outcome) for tried in attempts)
        raise StageError(
            f"every step of the optimisation failed: {context.variant} of {spec.name}\n{failures}",
            hint=f"ORTPREP_LOG=debug ortprep prepare {quoted(spec.name)}   (what ONNX Runtime said)",
        )


def _require_usable_source(spec: ModelSpec, graph: Graph) -> None:
    """Refuses a source that ONNX Runtime refuses, or cannot run on these inputs: no step broke it.

    Raises:
        SourceError: ONNX Runtime makes no session of it on the CPU, or crashes.
        StageError: It does not run on the CPU, as `verify` would run it.
    """
    name = spec.name
    plan = default_plan(str(graph.path), CPU, level="ORT_DISABLE_ALL")
    try:
        run_reload(plan, spec, graph.description.interface)
    except RunFailedError as error:
        _, _, reason = error.message.partition("\n")
        raise StageError(
            f"the model does not run on the inputs chosen for its trial: {name}\n{reason}",
            hint=f"inputs: {{NAME: {{values: […]}}}}, or samples: FILES.npz, in {quoted(name)}.yaml",
        ) from error
    except LoadError as error:
        raise SourceError(
            f"ONNX Runtime does not accept the model: {name}\n  {plain_refusal(error.message)}"
        ) from error
    except (ChildKilledError, ChildTimeoutError, ChildMemoryError):
        return  # the last step is the source, and says so
    except ChildError as error:
        raise SourceError(f"ONNX Runtime crashed on the model: {name}\n  {error.message}") from error


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
    options = step_options(spec.runtime, step)
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
        binding=plan.binding,
        bucket=plan.is_bucket,
    )
    return PreparedResult(variant, step.name, attempts, saved.onnxruntime)
