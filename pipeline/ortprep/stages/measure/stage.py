"""`measure`: default ONNX Runtime against what was prepared, in fresh processes, and what is shipped."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from ortprep.bundle.codec import encode
from ortprep.bundle.manifest import Decision, MeasurementRecord
from ortprep.children.bytecode import read_bytecode
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest, ProbeResult, join_results, measure_plan
from ortprep.errors import StageError
from ortprep.measuring.comparison import InterleavedRuns, run_interleaved
from ortprep.measuring.device_lock import measuring
from ortprep.measuring.shipped import DEFAULT, FIRST, FORKED, PARENT, PORTABLE, PREPARED
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.runtime.machine.hardware import hardware_fingerprint, read_hardware
from ortprep.stages.core.contract import Context, Plan, TaskId, target_of
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import (
    FETCH,
    MeasureResult,
    prepared_task,
    read_prepared,
    read_source,
    session_of,
    source_task,
)
from ortprep.stages.measure.decision import (
    STEADY_ALLOWANCE,
    PlanRounds,
    decide,
    decide_converted,
    decide_fallback,
    with_common_start,
)
from ortprep.stages.optimize.session_plans import Candidate, default_candidate, device_of, runtime_key
from ortprep.stages.verify.reference import read_shared_reference, reference_variant
from ortprep.tuning.objective import Objective

Runs: TypeAlias = InterleavedRuns[str, ProbeResult]


class MeasureStage:
    """Compares plans in interleaved rounds, a fresh process for every figure, and decides what is shipped."""

    name = "measure"
    version = 12

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns all variants but the portable one, which is measured along with those of its precision."""
        return plan.tuned_variants

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the source, every variant that is compared once it is verified, and the sample."""
        assert variant is not None
        compared = tuple(_compared_variants(plan, variant).values())
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
            "objective": plan.spec.tune.model_dump(include={"runs_per_load", "max_private_mb", "fork"}),
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
        candidates = _build_candidates(context)
        device = device_of(candidates[PREPARED][1])
        with (
            measuring(
                device, on_wait=lambda: context.say(f"waiting for another build or measurement on {device}")
            ),
            TemporaryDirectory(prefix="staged-", dir=context.folder) as folder,
        ):
            result = _Comparison(context, candidates, Path(folder)).run()
        if result.decision.shipped != PREPARED:
            context.say(result.decision.reason)
        return dict(encode(result))


class _Comparison:
    """The rounds of one task, and how many of its processes are done."""

    def __init__(self, context: Context, candidates: Mapping[str, Candidate], folder: Path) -> None:
        interface = read_source(context).description.interface
        self._context, self._candidates, self._spec = context, candidates, context.spec.measure
        self._sample = read_shared_reference(context).samples[0]
        self._staged = StagedBundles(folder, interface.inputs, interface.outputs)
        self._objective = Objective.of(context.spec.tune)
        self._planned = len(candidates) * (1 + self._spec.rounds + self._spec.cold_rounds)
        self._done = 0

    def run(self) -> MeasureResult:
        """Measures all rounds, and decides what ships.

        Raises:
            StageError: The prepared plan failed.
        """
        bytecode = run_child(read_bytecode, None, timeout_s=self._spec.timeout_s).value
        if bytecode.problem is not None:
            self._context.say(f"{bytecode.problem}, those measured here, too: {bytecode.remedy}")
        # Fills the page cache and is not counted. What fails in it is not tried again.
        first = self._measure_rounds(1)
        self._candidates = {name: self._candidates[name] for name in first.rounds}
        warm, decision = self._measure_until_sure()
        outcomes = {}
        if self._context.tunes_forks:
            decision = replace(decision, reason=f"as forked workers, on one thread: {decision.reason}")
            outcomes[FORKED] = warm
            self._planned += len(self._candidates) * self._spec.rounds
            warm = self._measure_rounds(self._spec.rounds)
            warm = replace(warm, rounds=with_common_start(warm.rounds))
            shipped = {FORKED: outcomes[FORKED].rounds[decision.shipped]}
            outcomes["warm"] = replace(warm, rounds={**warm.rounds, **shipped})
        else:
            outcomes["warm"] = self._with_forks(warm, decision)
        if rounds := self._spec.cold_rounds:
            outcomes["cold"] = self._measure_rounds(rounds, cold=True)
        records = tuple(
            MeasurementRecord(
                cache=cache,
                rounds=len(outcome.rounds[PREPARED]),
                shapes=self._sample.shapes,
                plans=tuple(join_results(plan, results) for plan, results in outcome.rounds.items()),
            )
            for cache, outcome in outcomes.items()
        )
        fallback = decision if decision.shipped == PORTABLE else None
        if fallback is None and self._context.target == "cpu":
            fallback = decide_fallback(warm.rounds, objective=self._objective)
        return MeasureResult(records, decision, fallback)

    def _with_forks(self, warm: Runs, decision: Decision) -> Runs:
        """Adds what a fork costs of a process that loaded what ships; says so if its runs are slower."""
        if self._context.target != "cpu":
            return warm
        rounds = len(warm.rounds[PREPARED])
        self._planned += rounds
        forks = run_interleaved(
            (FORKED,), lambda _: self._measure(decision.shipped, forked=True), max_rounds=rounds
        )
        default, forked = warm.rounds.get(DEFAULT, ()), forks.rounds.get(FORKED, ())
        if default and forked:
            ratio = median(one.steady_ms for one in forked) / median(one.steady_ms for one in default)
            if ratio > STEADY_ALLOWANCE:
                self._context.say(
                    f"a forked worker, on one thread, takes {ratio:.2f}× default ONNX Runtime's time per run;"
                    " threads_after of load_before_fork gives it more"
                )
        for reason in forks.failures.values():
            self._context.say(f"{FORKED} failed: {reason}")
        return replace(warm, rounds={**warm.rounds, **forks.rounds})

    def _measure_until_sure(self) -> tuple[Runs, Decision]:
        """Measures once more as long when the prepared plan loses.

        Another program that runs for a moment can only hide a gain. Of two equal plans this calls one faster
        about 1 % more often.
        """
        rounds, forked = self._spec.rounds, self._context.tunes_forks
        outcome = self._measure_rounds(rounds, forked=forked)
        compared = with_common_start(outcome.rounds)
        decision = self._decide(compared)
        if decision.shipped == PREPARED:
            return replace(outcome, rounds=compared), decision
        self._context.say(f"not faster beyond the noise after {rounds} rounds; measuring as many again")
        self._planned += len(self._candidates) * rounds
        outcome = outcome.followed_by(self._measure_rounds(rounds, first=rounds, forked=forked))
        compared = with_common_start(outcome.rounds)
        return replace(outcome, rounds=compared), self._decide(compared)

    def _decide(self, samples: PlanRounds) -> Decision:
        if self._context.variant_plan.has_own_precision:
            # It was asked for, and which of several a job is given is decided by what they cost.
            return decide_converted(samples, objective=self._objective)
        # The portable variant runs on the CPU: faster or not, it is no answer to who asked for a GPU.
        shippable = (PREPARED, PORTABLE) if self._context.target == "cpu" else (PREPARED,)
        return decide(samples, candidates=shippable, objective=self._objective)

    def _measure_rounds(
        self, rounds: int, *, first: int = 0, cold: bool = False, forked: bool = False
    ) -> Runs:
        """Measures interleaved rounds; raises StageError if the prepared plan fails."""
        outcome = run_interleaved(
            tuple(self._candidates),
            lambda name: self._measure(name, cold=cold, forked=forked),
            max_rounds=rounds,
            first=first,
        )
        for name, reason in outcome.failures.items():
            self._context.say(f"{name} failed: {reason}")
        if PREPARED in outcome.failures:
            raise StageError(
                f"the prepared model failed while it was measured\n  {outcome.failures[PREPARED]}",
                hint="raise measure.timeout_s in the spec, if it ran out",
            )
        return outcome

    def _measure(self, name: str, *, cold: bool = False, forked: bool = False) -> ProbeResult:
        """Measures a candidate once, in a process of its own or in a fork of one that loaded it."""
        timeout_s, (folder, variant), bundle = self._spec.timeout_s, self._candidates[name], None
        if name != DEFAULT or forked:
            bundle = self._staged.stage(folder, variant, timeout_s=timeout_s)
        read = sorted((bundle or folder).rglob("*")) if cold else ()
        request = ProbeRequest(
            session_of(folder, variant),
            self._sample.file,
            steady_s=self._spec.steady_s,
            drop_cache=tuple(str(path) for path in read if path.is_file()),
            bundle=None if bundle is None else str(bundle),
            forked=forked,
        )
        try:
            return measure_plan(request, timeout_s=timeout_s)
        finally:
            self._done += 1
            self._context.progress(self._done / max(self._planned, self._done))


def _compared_variants(plan: Plan, variant: str) -> Mapping[str, str]:
    """Returns the prepared variants that are measured together, by the name they have there."""
    parent = plan.variant_plans[variant].parent
    return {PREPARED: variant, PORTABLE: PORTABLE} if parent is None else {PREPARED: variant, PARENT: parent}


def _build_candidates(context: Context) -> dict[str, Candidate]:
    """Returns every way to load the variant's model that is measured, by name.

    The names are `default`, `prepared`, `first phase`, `portable` and `unconverted`.
    """
    plan = context.variant_plan
    candidates = {DEFAULT: default_candidate(context, plan)}
    for name, variant in _compared_variants(context.plan, plan.name).items():
        prepared, folder = read_prepared(context, variant)
        candidates[name] = folder, prepared.variant
    folder, later = candidates[PREPARED]
    if (first := later.first_phase) is not None:
        early = later._replace(session_options=first.session_options, providers=first.providers)
        candidates[FIRST] = folder, early
    return candidates
