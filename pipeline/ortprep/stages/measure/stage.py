"""`measure`: default ONNX Runtime against what was prepared, in fresh processes, and what is shipped."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from ortprep.bundle.codec import encode
from ortprep.bundle.manifest import Decision, MeasurementRecord
from ortprep.children.probe import ProbeRequest, ProbeResult, join_results, measure_plan
from ortprep.errors import StageError
from ortprep.measuring.device_lock import measuring
from ortprep.measuring.rounds import InterleavedRuns, run_interleaved
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.runtime.machine.hardware import hardware_fingerprint, read_hardware
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId, target_of
from ortprep.stages.core.inputs.samples import Sample
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import MeasureResult
from ortprep.stages.core.sources import FETCH, prepared_task, read_source, source_task
from ortprep.stages.measure.contenders import (
    PREPARED,
    Contender,
    build_contenders,
    compared_variants,
    device_of,
    is_shipped_as_asked,
)
from ortprep.stages.measure.decision import (
    decide,
    decide_converted,
    decide_fallback,
    with_common_start,
)
from ortprep.stages.optimize.session_plans import runtime_key
from ortprep.stages.verify.reference import fitting, read_reference, reference_variant
from ortprep.tuning.objective import Objective

Runs: TypeAlias = InterleavedRuns[str, ProbeResult]


class MeasureStage:
    """Compares plans in interleaved rounds, a fresh process for every figure, and decides what is shipped."""

    name = "measure"
    version = 7

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns all variants but the portable one, which is measured along with those of its precision."""
        return plan.tuned_variants

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the source, every variant that is compared once it is verified, and the sample."""
        assert variant is not None
        compared = tuple(compared_variants(plan, variant).values())
        verified = dict.fromkeys((*compared, reference_variant(plan)))
        return (
            *dict.fromkeys((FETCH, source_task(plan, variant))),
            *(prepared_task(plan, name) for name in compared),
            *(TaskId("verify", name) for name in verified),
        )

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what is measured and on what: another machine's figures say nothing of this one."""
        target = target_of(plan, variant)
        return {
            "measure": plan.spec.measure.model_dump(mode="json", exclude={"timeout_s"}),
            "objective": plan.spec.tune.model_dump(include={"runs_per_load", "max_private_mb", "max_gpu_mb"}),
            "runtime": runtime_key(plan.spec.runtime, target),
            "tools": runtime_versions(target, "numpy"),
            "python": platform.python_version(),
            "cpu_model": read_hardware(gpus=False).cpu_model,
            "hardware": hardware_fingerprint(target),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Measures every plan, page cache warm and cold, and chooses.

        Raises:
            StageError: The prepared plan itself did not answer in every round.
        """
        contenders = build_contenders(context)
        device = device_of(contenders)
        with (
            measuring(
                device, on_wait=lambda: context.say(f"waiting for another build or measurement on {device}")
            ),
            TemporaryDirectory(prefix="staged-", dir=context.folder) as folder,
        ):
            result = _compare(_Measurement.of(context, Path(folder)), contenders)
        if result.decision.shipped != PREPARED:
            context.say(result.decision.reason)
        return dict(encode(result))


@dataclass
class _Measurement:
    """What every round is measured with, and how many of its processes are done."""

    context: Context
    sample: Sample
    staged: StagedBundles
    planned: int = 0
    done: int = 0

    @classmethod
    def of(cls, context: Context, folder: Path) -> _Measurement:
        """Returns the measurement of a task, with staged bundles in a folder."""
        verified = context.upstream[TaskId("verify", reference_variant(context.plan))]
        interface = read_source(context).description.interface
        subject = f"{context.spec.name}/{context.variant}"
        sample = fitting(read_reference(verified.folder), interface, subject).samples[0]
        return cls(context, sample, StagedBundles(folder, interface.inputs, interface.outputs))

    def measure(self, contender: Contender, *, cold: bool) -> ProbeResult:
        """Measures a plan once, in a process of its own."""
        spec, bundle = self.context.spec.measure, None
        if contender.requirements is not None:
            bundle = self.staged.stage(
                contender.plan,
                contender.requirements,
                io_binding=contender.io_binding,
                timeout_s=spec.timeout_s,
            )
        read = sorted((bundle or contender.folder).rglob("*")) if cold else ()
        request = ProbeRequest(
            contender.plan,
            self.sample.file,
            steady_s=spec.steady_s,
            drop_cache=tuple(str(path) for path in read if path.is_file()),
            bundle=None if bundle is None else str(bundle),
            io_binding=contender.io_binding,
        )
        try:
            return measure_plan(request, timeout_s=spec.timeout_s)
        finally:
            self.done += 1
            self.context.progress(self.done / max(self.planned, self.done))


def _compare(run: _Measurement, contenders: Sequence[Contender]) -> MeasureResult:
    spec = run.context.spec.measure
    run.planned = len(contenders) * (1 + spec.rounds + spec.cold_rounds)
    # Fills the page cache and is not counted. What fails in it is not tried again.
    first = _measure_rounds(run, contenders, rounds=1)
    contenders = tuple(contender for contender in contenders if contender.name in first.rounds)
    warm, decision = _measure_until_sure(run, contenders)
    outcomes = {"warm": warm}
    if rounds := spec.cold_rounds:
        outcomes["cold"] = _measure_rounds(run, contenders, rounds=rounds, cold=True)
    records = tuple(
        MeasurementRecord(
            cache=cache,
            rounds=len(outcome.rounds[PREPARED]),
            shapes=run.sample.shapes,
            plans=tuple(join_results(plan, results) for plan, results in outcome.rounds.items()),
            skipped={**first.failures, **outcome.failures},
        )
        for cache, outcome in outcomes.items()
    )
    return MeasureResult(records, decision, _choose_fallback(run.context, warm, decision))


def _choose_fallback(context: Context, warm: Runs, decision: Decision) -> Decision | None:
    if decision.shipped == PORTABLE:
        return decision
    if context.target != "cpu":
        return None
    return decide_fallback(with_common_start(warm.rounds), objective=Objective.of(context.spec.tune))


def _measure_until_sure(run: _Measurement, contenders: Sequence[Contender]) -> tuple[Runs, Decision]:
    """Measures once more as long when the prepared plan loses.

    Another program that runs for a moment can only hide a gain. Of two equal plans this calls one faster
    about 1 % more often.
    """
    context = run.context
    rounds = context.spec.measure.rounds
    # Only the primary shape is measured here; the limit on runs is of all of them.
    objective = Objective.of(context.spec.tune, max_steady_ratio=None)
    outcome = _measure_rounds(run, contenders, rounds=rounds)
    if is_shipped_as_asked(context.variant_plan):
        # It was asked for, and which of several a job is given is decided by what they cost.
        return outcome, decide_converted(with_common_start(outcome.rounds), objective=objective)
    # The portable variant runs on the CPU: faster or not, it is no answer to who asked for a GPU.
    candidates = (PREPARED, PORTABLE) if context.target == "cpu" else (PREPARED,)
    decision = decide(with_common_start(outcome.rounds), candidates=candidates, objective=objective)
    if decision.shipped == PREPARED:
        return outcome, decision
    context.say(f"not faster beyond the noise after {rounds} rounds; measuring as many again")
    run.planned += len(contenders) * rounds
    more = _measure_rounds(run, contenders, rounds=rounds, first=rounds)
    outcome = outcome.followed_by(more)
    return outcome, decide(with_common_start(outcome.rounds), candidates=candidates, objective=objective)


def _measure_rounds(
    run: _Measurement, contenders: Sequence[Contender], *, rounds: int, first: int = 0, cold: bool = False
) -> Runs:
    """Measures interleaved rounds; raises StageError if the prepared plan fails."""
    by_name = {contender.name: contender for contender in contenders}
    outcome = run_interleaved(
        tuple(by_name), lambda name: run.measure(by_name[name], cold=cold), max_rounds=rounds, first=first
    )
    for name, reason in outcome.failures.items():
        run.context.say(f"{name} failed: {reason}")
    if PREPARED in outcome.failures:
        raise StageError(
            f"the prepared model failed while it was measured\n  {outcome.failures[PREPARED]}",
            hint="raise measure.timeout_s in the spec, if it ran out",
        )
    return outcome
