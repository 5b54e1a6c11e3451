"""`convert`: graph passes before the one-time optimisation, each gated by measured accuracy.

A target's own variant is the source with fused transformer subgraphs and bound dimensions, if the spec asks
for them. Its precisions are made from it, and buckets from those, so no pass runs twice.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.conversion_record import ConversionRecord, PrecisionStep
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_links import share_model
from ortprep.bundle.verification import describe_files
from ortprep.errors import SpecError, StageError
from ortprep.runtime.machine.hardware import hardware_fingerprint
from ortprep.spec.conversion import ConvertSpec
from ortprep.stages.convert.passes import choose_mode, fuse_transformers, fusion_name, run_pass
from ortprep.stages.convert.precision import SEARCHED, PrecisionAttempts, plan_steps, why_not_needed
from ortprep.stages.convert.requests import PassRequest
from ortprep.stages.convert.shapes import bind_shapes
from ortprep.stages.core.accuracy import convert_section, gate_key
from ortprep.stages.core.contract import (
    LEFT_OUT,
    SOURCE_PRECISION,
    Context,
    Plan,
    TaskId,
    VariantPlan,
    target_of,
)
from ortprep.stages.core.inputs.sample_files import (
    calibration_key,
    check_calibration,
    find_calibration_files,
    inputs_key,
    samples_key,
)
from ortprep.stages.core.ladder import TAKEN, descend, describe_failures
from ortprep.stages.core.provenance import installed_versions, runtime_versions
from ortprep.stages.core.results import ConvertResult, FetchResult
from ortprep.stages.core.sources import FETCH, Graph, read_graph, source_task
from ortprep.stages.fetch.inspection import inspect_file
from ortprep.stages.optimize.session_plans import runtime_key
from ortprep.stages.verify.reference import fitting, read_reference, reference_variant

_FUSED, _BOUND = ".fused", ".bound"
_SECTIONS = {"half": {"fp16", "bf16", "mixed"}, "quantize": {"int8", "int4"}, "search": {*SEARCHED}}
"""The sections of `convert` that decide a precision."""

_LIBRARIES = ("onnx", "numpy", "sympy", "onnx-ir", "onnxruntime-tools")


class ConvertStage:
    """Writes the graph that one variant is optimised from."""

    name = "convert"
    version = 2

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the variants whose graph differs from their parent's."""
        return tuple(variant.name for variant in plan.variant_plans.values() if variant.is_converted)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the graph it begins with and, for a precision, the source's answers."""
        variant_plan = _variant(plan, variant)
        graph = source_task(plan, variant_plan.parent)
        if not _changes_precision(variant_plan):
            return (graph,)
        return (graph, TaskId("verify", reference_variant(plan)))

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what decides the graph: the passes' options, their libraries, and what judges it."""
        variant_plan, target = _variant(plan, variant), target_of(plan, variant)
        convert = convert_section(plan.spec)
        libraries = {**runtime_versions(target), **installed_versions(*_LIBRARIES)}
        if not _changes_precision(variant_plan):
            used = set() if variant_plan.is_bucket else {"fusion"}
            options = convert.model_dump(mode="json", include=used)
            return {**options, "binding": dict(variant_plan.binding), "tools": libraries}
        steps = plan_steps(variant_plan.precision, convert.ladder)
        used = {section for section, precisions in _SECTIONS.items() if precisions & {*steps}}
        return {
            **gate_key(plan.spec),
            **convert.model_dump(mode="json", include=used),
            "steps": list(steps),
            "others": [name for name in convert.precisions(target) if name in steps[1:]],
            "inputs": inputs_key(plan.spec),
            "samples": samples_key(plan.spec),
            "calibration": calibration_key(plan.spec) if "quantize" in used else None,
            "runtime": runtime_key(plan.spec.runtime, target),
            "optimize": plan.spec.optimize.model_dump(mode="json", exclude={"timeout_s"}),
            "tools": libraries,
            "hardware": hardware_fingerprint(target),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Runs the passes, or goes down the ladder of precisions until the gate holds.

        Raises:
            StageError: A pass refuses the model, or no step of the ladder is accurate enough.
            SpecError: The calibration set does not fit the model.
        """
        variant, convert = context.variant_plan, convert_section(context.spec)
        parent = read_graph(context, source_task(context.plan, variant.parent))
        record = _record_of_parent(context)
        if not _changes_precision(variant):
            return _bind_and_fuse(context, convert, parent, record)
        steps = _descend(context, convert, parent)
        last_step = steps[-1]
        record = dataclasses.replace(
            record,
            asked=variant.precision,
            precision=last_step.precision,
            steps=steps,
            gate=convert.gate.thresholds(),
        )
        reason = why_not_needed(last_step.precision, _other_precisions(context, convert))
        if reason is not None:
            context.say(f"left out: {reason}")
            return {LEFT_OUT: reason, "record": encode(record)}
        return _result(context, parent, record)


def _variant(plan: Plan, variant: str | None) -> VariantPlan:
    assert variant is not None
    return plan.variant_plans[variant]


def _changes_precision(variant: VariantPlan) -> bool:
    return variant.has_own_precision and not variant.is_bucket


def _other_precisions(context: Context, convert: ConvertSpec) -> tuple[str, ...]:
    own = context.variant_plan.precision
    return tuple(name for name in convert.precisions(context.target) if name != own)


def _record_of_parent(context: Context) -> ConversionRecord:
    """Returns the record of the passes before: a variant's record lists all passes of its graph."""
    variant = context.variant_plan
    task = source_task(context.plan, variant.parent)
    if task == FETCH:
        return ConversionRecord(variant.precision, SOURCE_PRECISION)
    return decode(ConvertResult, context.upstream[task].result).record


def _bind_and_fuse(
    context: Context, convert: ConvertSpec, parent: Graph, record: ConversionRecord
) -> Mapping[str, Any]:
    variant, name = context.variant_plan, f"{context.spec.name}.onnx"
    current = parent.path
    if convert.fusion is not None and not variant.is_bucket:
        written, pass_name = context.folder / _FUSED / name, fusion_name(convert.fusion)
        context.say(f"running {pass_name}")
        fusion = PassRequest(source=current, written=written, fusion=convert.fusion)
        reply, fused_by = run_pass(context, pass_name, fuse_transformers, fusion, parent=parent)
        record = dataclasses.replace(
            record, fused=reply.fused, fused_by=reply.library, passes=(*record.passes, fused_by)
        )
        if record.fused:
            current = written
        else:
            context.say("fused nothing, which the spec allows")
    if variant.binding:
        written = context.folder / _BOUND / name
        context.say("running shapes")
        binding = PassRequest(source=current, written=written, dimensions=dict(variant.binding))
        _, bound_by = run_pass(context, "shapes", bind_shapes, binding, parent=parent)
        record = dataclasses.replace(
            record,
            binding=dict(variant.binding),
            passes=(*record.passes, bound_by),
            # Thresholds over all samples do not apply to the few that fit a bucket.
            gate=convert.gate.thresholds(of_all=False) if record.gate else {},
        )
        current = written
    return _result(context, parent, record, made=current)


def _descend(context: Context, convert: ConvertSpec, parent: Graph) -> tuple[PrecisionStep, ...]:
    """Tries precisions down the ladder, from the requested one; the last step returned is the taken one."""
    variant = context.variant_plan
    others = _other_precisions(context, convert)
    with closing(_attempts(context, convert, parent)) as attempts:

        def attempt(step: str) -> PrecisionStep:
            is_needed = why_not_needed(step, others) is None
            return attempts.try_step(step) if is_needed else PrecisionStep(step, TAKEN)

        tried = descend(plan_steps(variant.precision, convert.ladder), attempt)
        if tried[-1].outcome == TAKEN:
            if why_not_needed(tried[-1].precision, others) is None:
                _put_in_place(attempts.written, context.folder)
            return tried
    hint = "add to the spec: convert: {ladder: [int8, mixed, fp16, fp32]}; or widen the gate"
    if convert.ladder:
        hint = "end convert.ladder with fp32 to leave the variant out; or widen the gate in the spec"
    raise StageError(
        f"no precision of the ladder works: {context.spec.name}/{context.variant}\n"
        + describe_failures((step.precision, step.outcome) for step in tried),
        hint=attempts.hint or hint,
    )


def _attempts(context: Context, convert: ConvertSpec, parent: Graph) -> PrecisionAttempts:
    """Returns what makes the attempts.

    Raises:
        SpecError: The calibration set does not fit the model; no step of the ladder may hide it.
    """
    upstream = context.upstream[TaskId("verify", reference_variant(context.plan))]
    interface = parent.description.interface
    subject = f"{context.spec.name}/{context.variant}"
    reference = fitting(read_reference(upstream.folder), interface, subject)
    calibration: Sequence[Path] = ()
    mode = choose_mode(convert, context.target, parent.description.source.operators)
    if mode == "static":
        own = find_calibration_files(context.spec)
        calibration = own if own is not None else [sample.path for sample in reference.samples]
        try:
            check_calibration(calibration, interface)
        except StageError as error:
            raise SpecError(error.message, hint=error.hint) from error
    return PrecisionAttempts(context, parent=parent, reference=reference, mode=mode, calibration=calibration)


def _put_in_place(written: Path, folder: Path) -> None:
    for path in sorted(written.parent.iterdir()):
        path.rename(folder / path.name)


def _result(
    context: Context, parent: Graph, record: ConversionRecord, *, made: Path | None = None
) -> Mapping[str, Any]:
    """Puts the last pass's files in place, if they are not, and describes them."""
    model = context.folder / f"{context.spec.name}.onnx"
    if made is not None and made == parent.path:
        share_model(made, model)
    elif made is not None:
        _put_in_place(made, context.folder)
    for scratch in (_FUSED, _BOUND):
        shutil.rmtree(context.folder / scratch, ignore_errors=True)
    converted = _describe(model, parent, name=f"{context.spec.name}/{context.variant}")
    return dict(encode(ConvertResult(converted, record)))


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
    files = list(describe_files(model.parent, DigestCache().digest))
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
