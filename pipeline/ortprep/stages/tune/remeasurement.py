"""Measures a plan of an earlier search once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.tuning_record import TrialRecord, TuningRecord
from ortprep.children.probe import ProbeResult, join_results
from ortprep.errors import SpecError
from ortprep.measuring.device_lock import measuring, working
from ortprep.measuring.rounds import order_of_round
from ortprep.quoting import quoted
from ortprep.stages.core.contract import Context
from ortprep.stages.tune.search_context import SearchContext, open_search
from ortprep.tuning.knobs import FORM, LEVEL
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import DEFAULT, PlanChoice


@dataclass(frozen=True)
class Remeasurement:
    """A plan and default ONNX Runtime, measured in the same rounds."""

    choice: Mapping[str, str]
    figures: PlanFigures
    default: PlanFigures


def measure_again(context: Context, record: TuningRecord, number: int, *, rounds: int) -> Remeasurement:
    """Measures one trial of a search again, interleaved with default ONNX Runtime.

    Raises:
        SpecError: There is no such trial.
        PipelineError: The plan fails, as it may have done then.
    """
    if not 0 <= number < len(record.trials):
        raise SpecError(
            f"no such trial of {context.spec.name}: {number}\n  expected 0 to {len(record.trials) - 1}",
            hint=f"ortprep tune {quoted(context.spec.name)}",
        )
    trial = record.trials[number]
    with open_search(context) as search_context:
        with working():
            own, default = _plan_of(search_context, trial), search_context.plan_of(DEFAULT)
        plans = (("plan", PlanChoice(tuple(trial.choice.items())), own), ("default", DEFAULT, default))
        found: dict[str, list[ProbeResult]] = {"plan": [], "default": []}
        device = search_context.device
        waiting = f"waiting for another build or measurement on {device}"
        with measuring(device, on_wait=lambda: context.say(waiting)):
            for index in range(rounds):
                for name, choice, plan in order_of_round(plans, index):
                    found[name].append(search_context.measure(choice, plan))
    objective = Objective.of(search_context.objective, runs_per_load=record.runs_per_load)
    figures, anchors = found["plan"], found["default"]
    return Remeasurement(
        choice=trial.choice,
        figures=join_results(f"trial {number}", figures, cost_ratios=objective.ratios(figures, anchors)),
        default=join_results("default", anchors, cost_ratios=objective.ratios(anchors, anchors)),
    )


def _plan_of(search_context: SearchContext, trial: TrialRecord) -> SessionPlan:
    """Returns the plan as it was recorded, whatever the spec says by now, on files written if need be."""
    choice = PlanChoice(tuple(trial.choice.items()))
    if choice == DEFAULT:
        return search_context.plan_of(choice)
    if trial.session_options is None:
        raise SpecError(
            f"trial {trial.number} never got a session\n  {trial.failure}",
            hint=f"ortprep tune {quoted(search_context.context.spec.name)}",
        )
    model = search_context.artefacts.get(choice[FORM], choice[LEVEL]).path
    return SessionPlan(str(model), trial.session_options, trial.providers)
