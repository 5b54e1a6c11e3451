"""Measures a plan of an earlier search once more."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.bundle.session_record import SessionPlan
from pipeline.bundle.tuning_record import TrialFigures, TrialRecord, TuningRecord
from pipeline.errors import SpecError
from pipeline.measuring.device_lock import measuring, working
from pipeline.measuring.rounds import order_of_round
from pipeline.stages.contract import Context
from pipeline.stages.measure.contenders import device_of, source_contender, written_recipe
from pipeline.stages.tune.record import summarise_figures
from pipeline.stages.tune.workbench import Workbench, build_workbench
from pipeline.tuning.knobs import FORM, LEVEL
from pipeline.tuning.objective import Figures
from pipeline.tuning.space import DEFAULT, RECIPE, Choice


@dataclass(frozen=True)
class Again:
    """A plan and default ONNX Runtime, measured in the same rounds.

    Attributes:
        choice: The plan.
        figures: What it costs now.
        default: What default ONNX Runtime costs now.
    """

    choice: Mapping[str, str]
    figures: TrialFigures
    default: TrialFigures


def measure_again(context: Context, record: TuningRecord, number: int, *, rounds: int) -> Again:
    """Measures one trial of a search again, interleaved with default ONNX Runtime.

    Args:
        context: The search's task; `kept` takes files that have to be written again.
        record: The search.
        number: Of the trial.
        rounds: Fresh processes of each.

    Raises:
        SpecError: There is no such trial.
        PipelineError: The plan fails, as it may have done then.
    """
    if not 0 <= number < len(record.trials):
        raise SpecError(
            f"no such trial of {context.spec.name}: {number}\n  expected 0 to {len(record.trials) - 1}",
            hint=f"ortprep tune {context.spec.name}",
        )
    context.kept.mkdir(parents=True, exist_ok=True)
    default = source_contender(context)
    with ExitStack() as stack:
        with working():
            recipe, _ = stack.enter_context(written_recipe(context))
            others = dict(zip((DEFAULT, RECIPE), (default, *recipe), strict=False))
            staged = stack.enter_context(TemporaryDirectory(prefix="staged-", dir=context.kept))
            workbench = build_workbench(context, others, Path(staged))
            plan = _plan_of(workbench, record.trials[number])
        figures, anchors = _measure(workbench, record.trials[number], plan, device_of([default]), rounds)
    objective = replace(workbench.objective, runs_per_load=record.runs_per_load)
    return Again(
        choice=record.trials[number].choice,
        figures=summarise_figures(figures, anchors, objective),
        default=summarise_figures(anchors, anchors, objective),
    )


def _plan_of(workbench: Workbench, trial: TrialRecord) -> SessionPlan:
    """Returns the plan as it was recorded, whatever the spec says by now, on files written if need be."""
    choice = Choice(tuple(trial.choice.items()))
    if choice in (DEFAULT, RECIPE):
        return workbench.plan_of(choice)
    if trial.session_options is None:
        raise SpecError(
            f"trial {trial.number} never came to a session\n  {trial.failure}",
            hint=f"ortprep tune {workbench.context.spec.name}",
        )
    model = workbench.artefacts.get(choice[FORM], choice[LEVEL]).path
    return SessionPlan(str(model), trial.session_options, trial.providers)


def _measure(
    workbench: Workbench, trial: TrialRecord, plan: SessionPlan, device: str, rounds: int
) -> tuple[list[Figures], list[Figures]]:
    """Returns a plan's figures and the default's, round by round."""
    plans = {
        "plan": (Choice(tuple(trial.choice.items())), plan),
        "default": (DEFAULT, workbench.plan_of(DEFAULT)),
    }
    found: dict[str, list[Figures]] = {name: [] for name in plans}
    with measuring(device, on_wait=lambda: workbench.context.say(f"waiting for {device} to be idle")):
        for index in range(rounds):
            for name in order_of_round(tuple(plans), index):
                found[name].append(workbench.measure_plan(*plans[name]))
    return found["plan"], found["default"]
