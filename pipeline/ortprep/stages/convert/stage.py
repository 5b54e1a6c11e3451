"""`convert`: graph passes before the one-time optimisation, each gated by measured accuracy.

A target's own variant is the source with fused transformer subgraphs, if the spec asks for them. Its
precisions are made from it, so no pass runs twice.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.conversion_record import ConversionRecord, PrecisionStep
from ortprep.bundle.loader_config import SOURCE_PRECISION
from ortprep.bundle.verification import describe_files
from ortprep.errors import StageError
from ortprep.runtime.machine.hardware import hardware_fingerprint
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.passes import run_pass
from ortprep.stages.convert.precision import PrecisionAttempts, plan_steps, why_not_needed
from ortprep.stages.core.accuracy import convert_section, gate_key
from ortprep.stages.core.application_judge import judge_key
from ortprep.stages.core.contract import LEFT_OUT, Context, Plan, TaskId, VariantPlan, target_of
from ortprep.stages.core.provenance import installed_versions, runtime_versions
from ortprep.stages.core.results import (
    FETCH,
    TAKEN,
    FetchResult,
    Graph,
    describe_failures,
    read_fetched,
    read_graph,
    source_task,
)
from ortprep.stages.core.sample_files import (
    inputs_key,
    samples_key,
)
from ortprep.stages.core.spec_fit import require_fit
from ortprep.stages.fetch.inspection import inspect_file
from ortprep.stages.optimize.session_plans import runtime_key
from ortprep.stages.verify.reference import reference_variant

_LIBRARIES = ("onnx", "numpy", "sympy", "onnx-ir", "onnxruntime-tools")


class ConvertStage:
    """Writes the graph that one variant is optimised from."""

    name = "convert"
    version = 6

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the variants whose graph differs from their parent's."""
        return tuple(variant.name for variant in plan.variant_plans.values() if variant.is_converted)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the source, the graph it begins with and, for a precision, the source's answers."""
        variant_plan = _variant(plan, variant)
        graphs = dict.fromkeys((FETCH, source_task(plan, variant_plan.parent)))
        answers = (TaskId("verify", reference_variant(plan)),) if variant_plan.has_own_precision else ()
        return (*graphs, *answers)

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what decides the graph: the passes' options, their libraries, and what judges it."""
        variant_plan, target = _variant(plan, variant), target_of(plan, variant)
        convert = convert_section(plan.spec)
        libraries = {**runtime_versions(target), **installed_versions(*_LIBRARIES)}
        if not variant_plan.has_own_precision:
            return {**convert.model_dump(mode="json", include={"fusion"}), "tools": libraries}
        steps = plan_steps(variant_plan.precision, convert.steps_below)
        return {
            **gate_key(plan.spec),
            **judge_key(plan.spec),
            **convert.model_dump(mode="json", include={"keep_nodes", "quantize", "search"}),
            "steps": list(steps),
            "is_auto": convert.is_auto,
            "others": [name for name in convert.precisions(target) if name in steps[1:]],
            "inputs": inputs_key(plan.spec),
            "samples": samples_key(plan.spec),
            "runtime": runtime_key(plan.spec.runtime, target),
            "optimize": plan.spec.optimize.model_dump(mode="json", exclude={"timeout_s"}),
            "tools": libraries,
            "hardware": hardware_fingerprint(target),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Runs the passes, or tries fallback steps until the gate holds.

        Raises:
            StageError: A pass refuses the model, or no fallback step is accurate enough.
            SpecError: The spec does not fit the model, or a sample cannot calibrate.
        """
        require_fit(context.spec, read_fetched(context).description.interface)
        variant = context.variant_plan
        parent = read_graph(context, source_task(context.plan, variant.parent))
        # A variant's record lists all passes of its graph.
        record = parent.conversion or ConversionRecord(variant.precision, SOURCE_PRECISION)
        scratch = context.folder / ".scratch"
        try:
            if not variant.has_own_precision:
                return _fuse(context, scratch, parent, record)
            attempts = PrecisionAttempts(context, scratch, parent)
            steps = _descend(context, attempts)
            calibration, judged_on = attempts.sample_sets(steps)
            record = dataclasses.replace(
                record,
                asked=variant.precision,
                precision=steps[-1].precision,
                steps=steps,
                gate=convert_section(context.spec).thresholds(),
                calibration=calibration,
                judged_on=judged_on,
            )
            reason = why_not_needed(steps[-1].precision, _other_precisions(context))
            if reason is not None and convert_section(context.spec).is_auto:
                reason = steps[0].outcome
            if reason is None:
                return _result(context, parent, attempts.written, record)
            context.say(f"left out: {reason}")
            return {LEFT_OUT: reason, "conversion": encode(record)}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _variant(plan: Plan, variant: str | None) -> VariantPlan:
    assert variant is not None
    return plan.variant_plans[variant]


def _other_precisions(context: Context) -> tuple[str, ...]:
    requested = convert_section(context.spec).precisions(context.target)
    return tuple(name for name in requested if name != context.variant_plan.precision)


def _fuse(context: Context, scratch: Path, parent: Graph, record: ConversionRecord) -> Mapping[str, Any]:
    """Makes the model with fused subgraphs."""
    request = PassRequest(
        name="fusion",
        source=parent.path,
        written=scratch / "fusion" / f"{context.spec.name}.onnx",
        fusion=convert_section(context.spec).fusion,
    )
    context.say("running fusion")
    reply = run_pass(context, request)
    record = dataclasses.replace(record, fused=reply.fused, fused_by=reply.library)
    return _result(context, parent, request.written, record)


def _descend(context: Context, attempts: PrecisionAttempts) -> tuple[PrecisionStep, ...]:
    """Tries the requested precision, and then its fallback steps; the last step returned is the taken one."""
    fallbacks, others = convert_section(context.spec).steps_below, _other_precisions(context)

    tried: list[PrecisionStep] = []
    for step in plan_steps(context.variant_plan.precision, fallbacks):
        is_needed = why_not_needed(step, others) is None
        tried.append(attempts.try_step(step) if is_needed else PrecisionStep(step, TAKEN))
        if tried[-1].outcome == TAKEN:
            return tuple(tried)
    hint = "add to the spec: convert: {ladder: [int8, fp16, fp32]}; or widen the gate"
    if fallbacks:
        hint = "end convert.ladder with fp32 to leave the variant out; or widen the gate in the spec"
    raise StageError(
        f"no precision of the ladder works: {context.subject}\n"
        + describe_failures((step.precision, step.outcome) for step in tried),
        hint=attempts.hint or hint,
    )


def _result(context: Context, parent: Graph, made: Path, record: ConversionRecord) -> Mapping[str, Any]:
    """Puts the last pass's files in place, and describes them."""
    model = context.folder / f"{context.spec.name}.onnx"
    for path in sorted(made.parent.iterdir()):
        path.rename(context.folder / path.name)
    shutil.rmtree(context.folder / ".scratch", ignore_errors=True)
    converted = _describe(model, parent, name=context.subject)
    return dict(encode(dataclasses.replace(converted, conversion=record)))


def _describe(model: Path, parent: Graph, *, name: str) -> FetchResult:
    """Returns what is in a converted model, as `fetch` describes a source.

    Args:
        model: The file, in a folder of its own.
        parent: What it was made of; fusing hides which weights its inputs index, so that is taken from here.
        name: The model as the user knows it.

    Raises:
        SourceError: It is no model.
    """
    inspection = inspect_file(model, name=name)
    files = list(describe_files(model.parent, with_blocks=False))
    files.sort(key=lambda file: file.path != model.name)  # the model first
    source = dataclasses.replace(
        parent.description.source,
        kind="convert",
        location=model.name,
        sha256=files[0].sha256,
        files=tuple(files),
        opsets=inspection.opsets,
        ir_version=inspection.ir_version,
        operators=inspection.operators,
        initializer_bytes=inspection.initializer_bytes,
    )
    bounds = parent.description.interface.index_bounds
    return FetchResult(model.name, source, dataclasses.replace(inspection.interface, index_bounds=bounds))
