"""Measures a plan of an earlier search once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.bundle.tuning_record import TrialFigures, TuningRecord
from pipeline.errors import SpecError
from pipeline.stages.contract import Context
from pipeline.stages.device_lock import measuring
from pipeline.stages.measure.contenders import device_of, source_contender, written_recipe
from pipeline.stages.tune.record import summarise_figures
from pipeline.stages.tune.setting import Setting, build_setting
from pipeline.tuning.objective import Figures
from pipeline.tuning.rounds import order_of_round
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
    with written_recipe(context) as (recipe, _):
        others = dict(zip((DEFAULT, RECIPE), (default, *recipe), strict=False))
        setting = build_setting(context, others)
        choice = Choice(tuple(record.trials[number].choice.items()))
        found = _measure(setting, choice, device_of([default]), rounds)
    return Again(
        choice=choice.as_dict(),
        figures=summarise_figures(found[choice], found[DEFAULT], setting.objective),
        default=summarise_figures(found[DEFAULT], found[DEFAULT], setting.objective),
    )


def _measure(setting: Setting, choice: Choice, device: str, rounds: int) -> dict[Choice, list[Figures]]:
    setting.plan_of(choice)
    lanes = list(dict.fromkeys([DEFAULT, choice]))
    found: dict[Choice, list[Figures]] = {lane: [] for lane in lanes}
    with measuring(device, on_wait=lambda: setting.context.say(f"waiting for {device} to be idle")):
        for index in range(rounds):
            for position in order_of_round([str(i) for i in range(len(lanes))], index):
                lane = lanes[int(position)]
                found[lane].append(setting.measure(lane))
    return found
