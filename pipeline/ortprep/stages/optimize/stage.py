"""`optimize`: one optimising session on the target's provider writes the graph that jobs load.

What was written is linted and loaded in a fresh process; on a hazard or a failure the next step of the ladder
is tried, down to the source itself, and the record says why.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import Variant
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
from ortprep.stages.core.contract import SOURCE_PRECISION, Context, Plan, TaskId, target_of
from ortprep.stages.core.inputs.agreement import require_fit
from ortprep.stages.core.inputs.sample_files import inputs_key, samples_key
from ortprep.stages.core.ladder import descend, describe_failures, plain_refusal
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import PreparedResult
from ortprep.stages.core.sources import source_task
from ortprep.stages.optimize.attempt import (
    OptimizeJob,
    job_of,
    requirements_of,
    run_reload,
    try_step,
)
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.session_plans import (
    Step,
    loading_providers,
    plan_ladder,
    runtime_key,
    step_options,
)


class OptimizeStage:
    """Writes the prepared graph of one variant."""

    name = "optimize"
    version = 5

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
        """Goes down the ladder until a file is written that lints clean, loads and runs.

        Raises:
            SourceError: ONNX Runtime does not accept the source.
            StageError: Not even the source runs (the message has every step's reason, or what it was fed), or
                the disk is full.
            SpecError: The spec does not fit the model.
        """
        job = job_of(context)
        if job.graph.conversion is None:
            require_fit(job.spec, job.interface)
        optimize = job.spec.optimize
        steps = plan_ladder(job.role, level=optimize.level, disabled_optimizers=optimize.disabled_optimizers)
        taken: list[tuple[Step, SaveResult]] = []

        def attempt(step: Step) -> LadderAttempt:
            tried, saved = try_step(job, step)
            if saved is not None:
                taken.append((step, saved))
                return tried
            if step == steps[0] and job.graph.conversion is None:
                _require_usable_source(job)
            # A full disk passes; a model that was optimised less because of it would stay so.
            _require_disk_space(job)
            context.say(f"step {step.name!r} failed: {tried.outcome.splitlines()[0]}")
            return tried

        attempts = descend(steps, attempt)
        if not taken:
            failures = describe_failures((tried.step, tried.outcome) for tried in attempts)
            raise StageError(
                "every step of the optimisation ladder failed: "
                f"{job.variant.name} of {job.spec.name}\n{failures}",
                hint=f"ORTPREP_LOG=debug ortprep prepare {quoted(job.spec.name)}   (what ONNX Runtime said)",
            )
        return dict(encode(_result_of(job, *taken[0], attempts)))


def _require_usable_source(job: OptimizeJob) -> None:
    """Refuses a source that ONNX Runtime refuses, or cannot run on these inputs: no step broke it.

    Raises:
        SourceError: ONNX Runtime makes no session of it on the CPU, or crashes.
        StageError: It does not run on the CPU, as `verify` would run it.
    """
    name = job.spec.name
    plan = default_plan(str(job.graph.path), CPU, level="ORT_DISABLE_ALL")
    try:
        run_reload(plan, job.spec, job.interface)
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
        return  # the ladder ends with the source, and says so
    except ChildError as error:
        raise SourceError(f"ONNX Runtime crashed on the model: {name}\n  {error.message}") from error


def _require_disk_space(job: OptimizeJob) -> None:
    """Reserves a file of the source's size for a moment: quotas and limits count, which no free figure shows.

    Raises:
        StageError: It does not fit.
    """
    folder, size_bytes = job.folder, sum(entry.size_bytes for entry in job.graph.description.source.files)
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
    job: OptimizeJob, step: Step, saved: SaveResult, attempts: tuple[LadderAttempt, ...]
) -> PreparedResult:
    options = step_options(job.spec.runtime, step)
    providers = loading_providers(job.spec.runtime, job.role)
    precision = SOURCE_PRECISION if job.graph.conversion is None else job.graph.conversion.precision
    keeps_io = job.spec.convert is None or job.spec.convert.half.keep_io
    variant = Variant(
        name=job.variant.name,
        target=job.variant.target,
        model=job.model,
        files=(),
        session_options=options,
        providers=providers,
        requirements=requirements_of(job, saved, options, providers),
        precision=precision,
        binding=job.variant.binding,
        bucket=job.variant.is_bucket,
        half_io=not keeps_io and precision in ("fp16", "mixed"),
    )
    return PreparedResult(variant, step.name, attempts, saved.onnxruntime)
