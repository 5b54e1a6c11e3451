"""`tune`: searches artefact form, session and provider options, and prepares the best plan."""

from __future__ import annotations

import dataclasses
import functools
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.file_links import share_model
from ortprep.bundle.loader_config import FirstPhase
from ortprep.bundle.manifest import TrialRecord, TuningRecord
from ortprep.children.probe import ProbeResult, join_results
from ortprep.measuring.device_lock import measuring, working
from ortprep.runtime.machine.hardware import hardware_fingerprint, read_hardware
from ortprep.stages.core.accuracy import gate_key
from ortprep.stages.core.contract import Context, Plan, TaskId, target_of
from ortprep.stages.core.provenance import runtime_versions
from ortprep.stages.core.results import FETCH, PreparedResult, session_of, source_task
from ortprep.stages.optimize.requirements import needs_of_both
from ortprep.stages.optimize.session_plans import device_of, runtime_key
from ortprep.stages.tune.search_context import SearchContext, open_search
from ortprep.stages.verify.comparison import run_samples
from ortprep.stages.verify.reference import reference_variant, require_gate
from ortprep.tuning.final import PlanSelection, choose
from ortprep.tuning.objective import Objective, PlanSearchResult, Trial
from ortprep.tuning.search import SearchEffects, search
from ortprep.tuning.space import PlanChoice


class TuneStage:
    """Tries plans in fresh processes and returns the best of them."""

    name = "tune"
    version = 12

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns all variants but the portable one, or nothing for a spec that asks for no search."""
        return plan.tuned_variants if plan.spec.tune.max_trials > 0 else ()

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the source, the target's graph once verified, and the reference answers."""
        verified = dict.fromkeys((variant, reference_variant(plan)))
        return (
            *dict.fromkeys((FETCH, source_task(plan, variant))),
            TaskId("optimize", variant),
            *(TaskId("verify", name) for name in verified),
        )

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns what is searched, for what, and on what."""
        target, spec = target_of(plan, variant), plan.spec
        gated = variant is not None and plan.variant_plans[variant].has_own_precision
        return {
            **(gate_key(spec) if gated else {}),
            "tune": spec.tune.model_dump(mode="json", exclude={"timeout_s"}),
            "tolerances": spec.verify.model_dump(mode="json", exclude={"seed"}),
            "runtime": runtime_key(spec.runtime, target),
            "tools": runtime_versions(target, "numpy", "onnx"),
            "python": platform.python_version(),
            "cpu_model": read_hardware(gpus=False).cpu_model,
            "hardware": hardware_fingerprint(target),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Searches, and puts the chosen plan's files in place.

        Raises:
            StageError: Neither the default nor the prepared plan could be measured, or the disk is full.
        """
        with open_search(context) as search_context:
            search_result = _search(search_context)
            verdict = choose(search_context.space, search_context.objective, search_result)
            if context.tunes_forks:
                verdict = dataclasses.replace(verdict, reason=f"as forked workers: {verdict.reason}")
            with working():
                _require_gate(search_context, verdict)
                record = _build_record(search_context, search_result, verdict)
                # The files of plans go with the search, so the chosen ones are taken before it ends.
                result = _place_chosen(search_context, verdict, record)
        context.say(verdict.reason)
        return dict(encode(result))


def _search(search_context: SearchContext) -> PlanSearchResult:
    """Runs the search on this machine; time spent waiting for a device does not count."""
    context, tune = search_context.context, search_context.context.spec.tune
    device = device_of(search_context.default[1])
    starts: list[float] = []
    waited_s = 0.0

    @functools.cache
    def on_wait() -> None:
        context.say(f"waiting for another build or measurement on {device}")

    @contextmanager
    def held(lock: AbstractContextManager[None]) -> Iterator[None]:
        nonlocal waited_s
        started_s = time.monotonic()
        with lock:
            waited_s += time.monotonic() - started_s
            yield

    def prepare(choice: PlanChoice) -> None:
        with held(working(on_wait=on_wait)):
            search_context.load(choice)

    def measure(choice: PlanChoice, deadline_s: float) -> ProbeResult:
        with held(measuring(device, on_wait=on_wait)):
            figures = search_context.measure(choice, timeout_s=min(deadline_s, tune.timeout_s))
        # Plans are compared with one start for all: that of the search's first process.
        starts.append(figures.start_ms)
        context.progress(min((clock() - began_s) / tune.budget_s, 1.0))
        return figures.with_start(starts[0])

    def clock() -> float:
        return time.monotonic() - waited_s

    began_s = clock()
    effects = SearchEffects(measure=measure, clock=clock, say=context.say, prepare=prepare)
    return search(search_context.space, search_context.objective, effects)


def _require_gate(search_context: SearchContext, verdict: PlanSelection) -> None:
    """Judges the chosen plan of a converted variant on all that judges: trials used one per shape."""
    context = search_context.context
    if not context.variant_plan.has_own_precision:
        return
    plan, reference = session_of(*search_context.load(verdict.choice)), search_context.reference
    with tempfile.TemporaryDirectory(prefix=".answers-", dir=context.folder) as scratch:
        answers = run_samples(context, plan, reference.samples, Path(scratch))
        hint = "tune: {max_trials: 0}   # in the spec; the prepared model passed the gate"
        require_gate(context, reference, answers, subject="the chosen plan", hint=hint)


def _place_chosen(
    search_context: SearchContext, verdict: PlanSelection, record: TuningRecord
) -> PreparedResult:
    """Puts the chosen plan's files into the task's folder, and returns how jobs load them."""
    folder, variant = search_context.load(verdict.choice)
    share_model(folder / variant.model, search_context.context.folder / variant.model)
    if verdict.first_phase is not None:
        _, early = search_context.load(verdict.first_phase)
        variant = variant._replace(
            first_phase=FirstPhase(early.session_options, early.providers),
            requirements=needs_of_both(variant.requirements, early.requirements),
        )
    return dataclasses.replace(search_context.optimized, variant=variant, record=record)


def _build_record(
    search_context: SearchContext, result: PlanSearchResult, verdict: PlanSelection
) -> TuningRecord:
    """Returns the record of a search for the manifest."""
    objective = search_context.objective
    numbers = {trial.choice: trial.number for trial in result.trials}
    first = verdict.first_phase
    return TuningRecord(
        runs_per_load=objective.runs_per_load,
        knobs={knob: tuple(values) for knob, values in search_context.space.knobs.items()},
        trials=tuple(_record_trial(search_context, result, trial) for trial in result.trials),
        chosen=numbers[verdict.choice],
        reason=verdict.reason,
        elapsed_s=round(result.elapsed_s, 3),
        first_phase=None if first is None else numbers[first],
        overlap_mb=verdict.overlap_mb or 0.0,
    )


def _record_trial(search_context: SearchContext, result: PlanSearchResult, trial: Trial) -> TrialRecord:
    """Returns a trial as the manifest records it."""
    objective = search_context.objective
    finals = result.finals.get(trial.choice, ())
    baselines = result.finals.get(result.baseline, ())
    return TrialRecord(
        number=trial.number,
        choice=trial.choice.as_dict(),
        figures=_join(trial, trial.figures, trial.baselines, objective) if trial.failure is None else None,
        failure=trial.failure,
        violations=objective.violations(finals or trial.figures) if trial.figures else (),
        final=_join(trial, finals, baselines, objective),
    )


def _join(
    trial: Trial, figures: Sequence[ProbeResult], baselines: Sequence[ProbeResult], objective: Objective
) -> PlanFigures | None:
    if not figures or not baselines:
        return None
    ratios = objective.ratios(figures, baselines)
    return join_results(f"trial {trial.number}", figures, cost_ratios=ratios)
