"""`verify`: does the prepared model answer as its source does?

The reference is the source as it stands, unoptimised, on the CPU; the candidate is the written file as jobs
will load it, on its target. A third session, the source as plain ONNX Runtime optimises it on the CPU, gives
the noise floor: what tolerance is honest for this model. They run one after another, each in a process of its
own, and leave their outputs in files, so that no two of them ever stand in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.bundle.manifest import VerificationRecord
from ortprep.children.answers import Answers
from ortprep.errors import PipelineError, VerificationError
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.machine.hardware import hardware_fingerprint
from ortprep.stages.core.accuracy import gate_key
from ortprep.stages.core.contract import Context, Plan, TaskId, target_of
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import (
    FETCH,
    VerifyResult,
    read_optimized,
    read_source,
    session_of,
    source_task,
)
from ortprep.stages.core.sample_files import inputs_key, samples_key
from ortprep.stages.verify.comparison import (
    SampleComparison,
    build_errors,
    describe_failure,
    find_worst,
    judge,
    run_samples,
    suggest,
)
from ortprep.stages.verify.golden_sample import GOLDEN_FILE, OWN_GOLDEN_FILE, keep_golden
from ortprep.stages.verify.reference import (
    ReferenceAnswers,
    judging,
    make_reference,
    read_shared_reference,
    reference_variant,
    require_gate,
    source_plan,
)


class VerifyStage:
    """Compares every output of every sample, and fails the build if one is outside its tolerance."""

    name = "verify"
    version = 7

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns every variant that is built, the one whose task runs the source first."""
        return tuple(dict.fromkeys((reference_variant(plan), *plan.variants)))

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the source, the written model, and, for all variants but one, the reference."""
        owner = reference_variant(plan)
        reference = () if variant == owner else (TaskId("verify", owner),)
        graphs = dict.fromkeys((FETCH, source_task(plan, variant)))
        return (*graphs, TaskId("optimize", variant), *reference)

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns tolerances, inputs, every byte of the samples, and what computes the answers."""
        spec, target = plan.spec, target_of(plan, variant)
        gated = variant is not None and plan.variant_plans[variant].has_own_precision
        return {
            **(gate_key(spec) if gated else {}),
            "verify": spec.verify.key(),
            "inputs": inputs_key(spec),
            "samples": samples_key(spec),
            # numpy draws the seeded inputs.
            "tools": runtime_versions(target, "numpy"),
            "hardware": hardware_fingerprint(target),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Runs source and candidate and compares them; one variant's task keeps the reference for the others.

        Raises:
            VerificationError: The candidate does not run, or does not answer as the source does.
            SpecError: The spec, or a sample of it, does not fit the model.
            SourceError: A sample changed since the key was computed.
            StageError: The source does not run on the CPU.
            OSError: The disk is full.
        """
        own_precision = context.variant_plan.has_own_precision
        # Below the stage's own folder, since /tmp may be memory and outputs may be large.
        with TemporaryDirectory(prefix="answers-", dir=context.folder) as folder:
            scratch = Path(folder)
            every = _reference(context, scratch)
            reference = judging(every, read_source(context))
            candidate = _run_candidate(context, reference, scratch)
            tolerances = context.spec.verify.tolerances(reference.noise)
            judged = tuple(judge(tolerances, reference.samples, expected=reference.answers, got=candidate))
            accuracy: tuple[OutputAccuracy, ...] = ()
            if own_precision:
                accuracy = require_gate(
                    context,
                    reference,
                    candidate,
                    subject="the prepared model",
                    hint="optimize: {level: extended} in the spec; what convert wrote passed the gate",
                )
            elif not all(item.comparison.ok for item in judged):
                raise _explain(context, reference, judged, scratch)
            elif (worst := find_worst(judged).comparison).ratio > 1:
                context.say(
                    f"{worst.name}: {worst.wrong} of {worst.count} elements are outside the tolerance, "
                    "as rounding in plain ONNX Runtime makes them"
                )
            drawn = scratch / "drawn"
            if own_precision:
                # Its answers are further from the source's than a tolerance allows.
                optimized, place = read_optimized(context, context.variant)
                plan = session_of(place, optimized.variant)
                keep_golden(context, OWN_GOLDEN_FILE, reference.samples, candidate, plan=plan, scratch=drawn)
            if _makes_reference(context):
                plan = source_plan(context)
                keep_golden(context, GOLDEN_FILE, every.samples, every.answers, plan=plan, scratch=drawn)
        record = VerificationRecord(
            rtol=tolerances[""].rtol,
            atol=tolerances[""].atol,
            samples=len(reference.samples),
            inputs="seeded" if context.spec.samples is None else "samples",
            # What a gate judges has its figures in `accuracy`; no tolerance applies to it.
            errors=() if own_precision else build_errors(judged),
            noise_floor=reference.noise,
        )
        return dict(encode(VerifyResult(record, accuracy)))


def _makes_reference(context: Context) -> bool:
    return context.variant == reference_variant(context.plan)


def _reference(context: Context, scratch: Path) -> ReferenceAnswers:
    if _makes_reference(context):
        return make_reference(context, scratch)
    owner = TaskId("verify", reference_variant(context.plan))
    context.say(f"source on CPU: reusing the answers for {owner}")
    return read_shared_reference(context)


def _run_candidate(context: Context, reference: ReferenceAnswers, scratch: Path) -> Answers:
    """Returns the prepared model's answers, which have the source's names and types."""
    optimized, folder = read_optimized(context, context.variant)
    context.say(f"prepared model ({optimized.step})")
    try:
        session = session_of(folder, optimized.variant)
        candidate = run_samples(context, session, reference.samples, scratch / "candidate")
    except PipelineError as error:
        raise VerificationError(
            f"the prepared model does not run: {context.subject}\n  {error.message}", hint=error.hint
        ) from error
    _require_signature(context, reference.answers, candidate)
    return candidate


def _require_signature(context: Context, expected: Answers, got: Answers) -> None:
    """Compares what the sessions declare, but for shapes: an output's may have become more exact.

    Raises:
        VerificationError: The candidate takes or gives something else.
    """
    for what, left, right in (
        ("inputs", expected.inputs, got.inputs),
        ("outputs", expected.outputs, got.outputs),
    ):
        wanted, found = (", ".join(f"{one.name} {one.dtype}" for one in side) for side in (left, right))
        if wanted != found:
            raise VerificationError(
                f"the prepared model's {what} differ from its source's: {context.subject}\n"
                f"  expected {wanted}, got {found}"
            )


def _explain(
    context: Context, reference: ReferenceAnswers, judged: Sequence[SampleComparison], scratch: Path
) -> VerificationError:
    """Returns the error for answers outside their tolerance: the source's fault if it answers at random."""
    subject, worst = context.subject, find_worst(judged)
    noise = next((error for error in reference.noise if error.output == worst.comparison.name), None)
    failure = describe_failure(judged, noise)
    again = run_samples(context, source_plan(context), reference.samples, scratch / "again")
    tolerances = context.spec.verify.tolerances(reference.noise)
    repeated = judge(tolerances, reference.samples, expected=reference.answers, got=again)
    if not all(item.comparison.ok for item in repeated):
        return VerificationError(
            f"the source gives different answers each time it runs: {subject}\n{failure}",
            hint="give its random operators a seed attribute; random answers cannot be verified",
        )
    providers = read_optimized(context, context.variant)[0].variant.providers
    in_tf32 = any(one.name == CUDA and one.options.get("use_tf32") != "0" for one in providers)
    hint = suggest(worst, noise, in_tf32=in_tf32)
    return VerificationError(
        f"the prepared model's answers differ from its source's: {subject}\n{failure}", hint=hint
    )
