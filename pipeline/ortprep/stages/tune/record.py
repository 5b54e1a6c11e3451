"""A search as the manifest records it."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.tuning_record import FirstPhaseRecord, TrialRecord, TuningRecord
from ortprep.children.probe import ProbeResult, join_results
from ortprep.errors import PipelineError
from ortprep.stages.tune.search_context import SearchContext
from ortprep.tuning.objective import Objective, Trial
from ortprep.tuning.plan_selection import PlanSelection
from ortprep.tuning.search import PlanSearchResult


def build_record(
    search_context: SearchContext, result: PlanSearchResult, verdict: PlanSelection
) -> TuningRecord:
    """Returns the record of a search for the manifest."""
    objective = search_context.objective
    numbers = {trial.choice: trial.number for trial in result.trials}
    limits = objective.model_dump(include={"max_private_mb", "max_gpu_mb", "max_steady_ratio"})
    first = verdict.first_phase
    return TuningRecord(
        runs_per_load=objective.runs_per_load,
        limits={name: value for name, value in limits.items() if value is not None},
        knobs={knob: tuple(values) for knob, values in search_context.space.knobs.items()},
        trials=tuple(_record_trial(search_context, result, trial) for trial in result.trials),
        chosen=numbers[verdict.choice],
        beats_default=verdict.beats_default,
        reason=verdict.reason,
        ended=result.ended,
        noise=result.noise,
        elapsed_s=round(result.elapsed_s, 3),
        first_phase=None
        if first is None or verdict.overlap_mb is None
        else FirstPhaseRecord(numbers[first], verdict.overlap_mb),
    )


def _record_trial(search_context: SearchContext, result: PlanSearchResult, trial: Trial) -> TrialRecord:
    plan = _plan_of(search_context, trial)
    objective = search_context.objective
    finals, anchors = result.finals.get(trial.choice, ()), result.finals.get(result.anchor, ())
    decisive = (finals, anchors) if finals and anchors else (trial.figures, trial.anchors)
    return TrialRecord(
        number=trial.number,
        kind=trial.kind,
        choice=trial.choice.as_dict(),
        session_options=plan.session_options if plan else None,
        providers=plan.providers if plan else (),
        figures=_join(trial, trial.figures, trial.anchors, objective) if trial.failure is None else None,
        failure=trial.failure,
        violations=objective.violations(*decisive) if trial.figures else (),
        final=_join(trial, finals, anchors, objective),
    )


def _plan_of(search_context: SearchContext, trial: Trial) -> SessionPlan | None:
    try:
        return search_context.plan_of(trial.choice)
    except PipelineError:
        return None  # its files could not be made, which is the trial's failure


def _join(
    trial: Trial, figures: Sequence[ProbeResult], anchors: Sequence[ProbeResult], objective: Objective
) -> PlanFigures | None:
    rounds = min(len(figures), len(anchors))  # a plan that left a comparison has fewer
    if not rounds:
        return None
    ratios = objective.ratios(figures[:rounds], anchors[:rounds])
    return join_results(f"trial {trial.number}", figures[:rounds], cost_ratios=ratios)
