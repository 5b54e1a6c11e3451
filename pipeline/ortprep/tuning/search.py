"""The search for a plan: which plans are tried, how often, and when it ends. No clock, disk or process.

The order:

- the default, the recipe, the base, and the base without prepacking, which is often the best first phase;
- every single change of the base;
- what these predict to be best, as long as it is better than the prediction of every tried plan;
- every single change of the best plan, since two changes may add up to more or less than their factors;
- a sampler.

Plans of one batch race: every round measures the anchor (the default) and each plan once, in a changing
order; a plan far behind after its first round is dropped. The best few are then compared again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

from ortprep.errors import PipelineError, TuningError
from ortprep.measuring.rounds import order_of_round
from ortprep.tuning.batch_run import BatchRun
from ortprep.tuning.budget import SearchLimits, TimeBudget, process_s
from ortprep.tuning.final import compare_finalists, measure_with_retry, pick_entrants
from ortprep.tuning.knobs import OFF, PREPACKING, shares_files
from ortprep.tuning.objective import Figures, Finals, Objective, Trial
from ortprep.tuning.phases import rank_firsts, until_ready
from ortprep.tuning.prediction import fit
from ortprep.tuning.space import DEFAULT, RECIPE, PlanChoice, Space

HOPELESS = 1.1
"""A plan that costs this much more than the best one in its first round is not measured again."""

BATCH = 4
"""Plans that race side by side; more would put minutes between a plan and its anchor."""

FINALISTS = 3
"""Best plans that are compared again before one is chosen."""

REACH = 1.3
"""A change of the best plan that is predicted to cost so much more is not tried."""

IDLE = 1.005
"""Changes that together gain less than this, or than the noise, are left out of a finalist."""

PATIENCE = 2
"""Batches of the sampler without a gain beyond the noise after which no more is expected."""

MIN_DEADLINE_S = 30.0
PATIENT = 10.0
"""A plan may take this many times what the slower of default and base took."""


@dataclass(frozen=True)
class SearchEffects:
    """Side effects of a search.

    Attributes:
        measure: Measures a plan in a fresh process, given its deadline in seconds (infinite while nothing is
            known); a `PipelineError` is a failed trial.
        suggest: Asks a sampler for a plan, given all trials; None if it has none.
        known: Trials of an earlier, interrupted run; they are not measured again.
        prepare: Writes a plan's files before any plan of its batch is measured; `measure` repeats its errors.
    """

    measure: Callable[[PlanChoice, float], Figures]
    suggest: Callable[[Sequence[Trial]], PlanChoice | None]
    clock: Callable[[], float]
    record: Callable[[Trial], None] = lambda _: None
    known: Mapping[PlanChoice, Trial] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    prepare: Callable[[PlanChoice], None] = lambda _: None


@dataclass(frozen=True)
class PlanSearchResult:
    """Result of a search.

    Attributes:
        trials: Every plan that was tried, in order.
        finals: Figures of the last comparison, the anchor's included. A plan that failed is absent; an anchor
            that failed has the rounds before.
        noise: Distance between the quartiles of a plan's cost relative to the anchor's in the same round.
        elapsed_s: Seconds, interrupted runs included.
    """

    trials: tuple[Trial, ...]
    finals: Finals
    anchor: PlanChoice
    noise: float
    ended: str
    elapsed_s: float


def search(
    space: Space, objective: Objective, limits: SearchLimits, effects: SearchEffects
) -> PlanSearchResult:
    """Searches a space for the plan that costs a job least.

    Raises:
        TuningError: Neither the default nor the base could be measured.
    """
    return _Search(space, objective, limits, effects).run()


class _Search:
    """The bookkeeping of one search."""

    def __init__(
        self, space: Space, objective: Objective, limits: SearchLimits, effects: SearchEffects
    ) -> None:
        self._space, self._objective, self._limits, self._effects = space, objective, limits, effects
        self._trials: dict[PlanChoice, Trial] = {}
        self._anchor = DEFAULT
        self._budget = TimeBudget(limits.budget_s, effects.clock, effects.known.values())
        self._deadline_s = math.inf
        self._enumerated: tuple[PlanChoice, ...] = ()

    def run(self) -> PlanSearchResult:
        self._begin()
        ended = self._explore()
        self._add_known_trials()
        finals = self._compare_finalists()
        return PlanSearchResult(
            trials=tuple(self._trials.values()),
            finals=finals,
            anchor=self._anchor,
            noise=self._noise(),
            ended=ended,
            elapsed_s=self._budget.elapsed_s(),
        )

    def _begin(self) -> None:
        """Tries the plans that the others are compared with."""
        base = self._space.base
        self._try([DEFAULT], "default")
        if self._trials[DEFAULT].failure is not None:
            self._effects.say(f"default not measured: {self._trials[DEFAULT].failure}")
            self._anchor = base
        if self._anchor == DEFAULT:
            self._try([base, RECIPE, *self._known_firsts()], "screening")
        else:
            self._try([base], "base")
        failure = self._trials[self._anchor].failure
        if failure is not None:
            raise TuningError(f"nothing to compare with: neither the default nor the base runs\n  {failure}")
        known = [process_s(self._trials[choice]) for choice in (DEFAULT, base) if self._works(choice)]
        self._deadline_s = max(MIN_DEADLINE_S, PATIENT * max(known))
        self._try([RECIPE], "recipe")

    def _known_firsts(self) -> list[PlanChoice]:
        """Returns the change of the base that is ready soonest for most models."""
        changed = self._space.neighbours(self._space.base) if self._objective.two_phases else ()
        return [choice for choice in changed if choice.as_dict().get(PREPACKING) == OFF]

    def _add_known_trials(self) -> None:
        """Adds the trials of an earlier run that this one did not reach."""
        for choice, trial in self._effects.known.items():
            if choice not in self._trials:
                self._trials[choice] = replace(trial, number=len(self._trials))

    def _explore(self) -> str:
        barren = 0
        while barren < PATIENCE:
            if reason := self._exhausted():
                return reason
            best = self._best_score()
            kind, batch = self._next_batch()
            if not batch:
                return "the sampler has nothing new"
            self._try(batch, kind)
            gained = self._best_score() < best * (1 - self._noise())
            barren = 0 if gained else barren + (kind == "sampler")
        return "the expected gain is below the noise"

    def _next_batch(self) -> tuple[str, Sequence[PlanChoice]]:
        if singles := self._new(self._space.neighbours(self._space.base)):
            return "screening", singles[:BATCH]
        if promising := self._promising():
            return "combination", promising
        if around := self._around_best():
            return "screening", around[:BATCH]
        return "sampler", self._sampled()

    def _new(self, choices: Iterable[PlanChoice]) -> list[PlanChoice]:
        return [choice for choice in choices if choice not in self._trials]

    def _exhausted(self) -> str | None:
        # Some of the plans that are compared at last may be new.
        reserved = min(FINALISTS, self._limits.max_trials // 8)
        if len(self._trials) >= self._limits.max_trials - reserved:
            return f"max_trials, {self._limits.max_trials}, is used up or reserved for the last comparison"
        if not self._works(self._space.base) and self._new(self._space.neighbours(self._space.base)):
            return None  # there may be nothing to prepare yet
        if self._budget.is_spent(self._finalists()):
            return f"{self._limits.budget_s:g} s are used up or reserved for the last comparison"
        return None

    def _finalists(self) -> int:
        """Returns the minimum number of plans in the last comparison."""
        return min(len((self._anchor, self._space.base)) + FINALISTS, len(self._trials))

    def _try(self, choices: Iterable[PlanChoice], kind: str) -> None:
        choices = dict.fromkeys(choices)
        for choice in [choice for choice in self._new(choices) if choice in self._effects.known]:
            self._trials[choice] = replace(self._effects.known[choice], number=len(self._trials))
        new = self._new(choices)
        room = max(self._limits.max_trials, len((self._anchor, self._space.base))) - len(self._trials)
        if room > 0 and new:
            self._race(new[:room], kind)

    def _race(self, choices: Sequence[PlanChoice], kind: str) -> None:
        """Measures plans in rounds; one that fails, or is hopeless, leaves the batch."""
        batch = BatchRun(choices, self._anchor)
        for choice in choices:
            started = self._effects.clock()
            with suppress(PipelineError):
                self._effects.prepare(choice)
            batch.spend(choice, self._effects.clock() - started)
        for index in range(self._limits.repeats):
            running = [choice for choice in choices if batch.runs(choice) and self._has_hope(batch, choice)]
            if not running:
                break
            self._measure_round(batch, running, index)
        kinds = {self._space.base: "base", RECIPE: "recipe"}
        for choice in choices:
            trial = batch.trial(choice, number=len(self._trials), kind=kinds.get(choice, kind))
            self._trials[choice] = trial
            self._effects.record(trial)
            self._report(trial)

    def _measure_round(self, batch: BatchRun, choices: Sequence[PlanChoice], index: int) -> None:
        for choice in order_of_round(list(dict.fromkeys([self._anchor, *choices])), index):
            started = self._effects.clock()
            try:
                result: Figures | str = measure_with_retry(self._measure, choice)
            except PipelineError as error:
                result = error.message
            batch.spend(choice, self._effects.clock() - started)
            batch.add(choice, result)
        batch.close_round(choices)

    def _measure(self, choice: PlanChoice) -> Figures:
        started = self._effects.clock()
        figures = self._effects.measure(choice, self._deadline_s)
        self._budget.add_process(self._effects.clock() - started)
        return figures

    def _has_hope(self, batch: BatchRun, choice: PlanChoice) -> bool:
        trial = batch.trial(choice, number=0, kind="")
        if not trial.figures or choice in (self._anchor, self._space.base, RECIPE):
            return True
        return self._objective.score(trial) < HOPELESS * self._best_score()

    def _report(self, trial: Trial) -> None:
        if trial.failure is not None:
            self._effects.say(f"trial {trial.number} failed: {trial.choice}: {trial.failure.splitlines()[0]}")

    def _allowed(self) -> list[Trial]:
        own = (trial for trial in self._trials.values() if trial.choice not in (DEFAULT, RECIPE))
        return [trial for trial in own if self._objective.is_allowed(trial)]

    def _best_score(self) -> float:
        return min((self._objective.score(trial) for trial in self._allowed()), default=float("inf"))

    def _noise(self) -> float:
        """Returns the distance between the quartiles of a plan's cost relative to the anchor's."""
        others = (trial for choice, trial in self._trials.items() if choice != self._anchor)
        ratios = [self._objective.ratios(trial.figures, trial.anchors)[:2] for trial in others]
        gaps = [abs(math.log(pair[0] / pair[1])) for pair in ratios if len(pair) == 2 and min(pair) > 0]
        # Of a normal distribution the median gap of two values is 0.954 standard deviations, the quartiles
        # 1.349.
        return 1.349 / 0.954 * median(gaps) if gaps else 0.0

    def _promising(self) -> list[PlanChoice]:
        """Returns new plans that are predicted to beat the prediction of every tried plan, best first.

        The best of many noisy measurements is too good to compare with.
        """
        predictor = fit(self._space, self._trials.values())
        if predictor is None or not self._allowed():
            return []
        cost = predictor.cost
        new = (choice for choice in self._every_plan() if choice not in self._trials)
        nearest = heapq.nsmallest(BATCH - 1, new, key=lambda choice: cost(choice, self._objective))
        seen = min(cost(trial.choice, self._objective) for trial in self._allowed())
        return [choice for choice in nearest if cost(choice, self._objective) < seen * 0.999]

    def _around_best(self) -> list[PlanChoice]:
        """Returns the untried single changes of the best plan, by their predicted cost."""
        predictor = fit(self._space, self._trials.values())
        if predictor is None or not self._allowed():
            return []
        best = min(self._allowed(), key=self._objective.score).choice
        limit = REACH * predictor.cost(best, self._objective)
        costs = {
            choice: predictor.cost(choice, self._objective)
            for choice in self._new(self._space.neighbours(best))
        }
        return sorted((choice for choice, cost in costs.items() if cost < limit), key=lambda c: costs[c])

    def _every_plan(self) -> tuple[PlanChoice, ...]:
        self._enumerated = self._enumerated or tuple(self._space.choices())
        return self._enumerated

    def _sampled(self) -> list[PlanChoice]:
        batch: list[PlanChoice] = []
        predictor = fit(self._space, self._trials.values())
        for _ in range(8 * BATCH):
            choice = self._effects.suggest(tuple(self._trials.values()))
            if choice is None or len(batch) == BATCH - 1:
                break
            choice = self._space.canonical(choice)
            # What hangs would take its whole deadline each time.
            hopeless = predictor is not None and predictor.cost(choice, self._objective) == float("inf")
            if choice not in self._trials and choice not in batch and not hopeless:
                batch.append(choice)
        return batch

    def _compare_finalists(self) -> Finals:
        """Compares the best plans again, with the first-phase candidates."""
        allowed = sorted(self._allowed(), key=self._objective.score)
        strict = [trial.choice for trial in allowed if self._objective.keeps_limits(trial)]
        ranked = list(dict.fromkeys([*(trial.choice for trial in allowed[:1]), *strict]))
        plain = self._without_idle_changes(ranked[0], self._objective) if ranked else self._space.base
        if self._budget.has_room_before(self._finalists(), processes=3 * self._limits.repeats):
            self._try([plain, *self._predicted_firsts(plain)], "final")
        entrants = pick_entrants(
            self._anchor,
            # The best comes first, and what there is no time for is left out from the end.
            [one for one in (*ranked[:1], plain, self._space.base, *ranked[1:FINALISTS]) if self._works(one)],
            rank_firsts(self._trials.values(), plain, self._objective),
            most=self._budget.affordable_plans(len(self._trials)),
        )
        self._effects.say(f"{len(self._trials)} plans tried; comparing {len(entrants.all)} of them again")
        return compare_finalists(
            entrants,
            self._objective,
            most_rounds=self._limits.rounds,
            measure=self._measure,
            has_time=self._budget.has_time,
        )

    def _predicted_firsts(self, second: PlanChoice) -> list[PlanChoice]:
        """Returns the plans predicted to be ready soonest: of all, and of those without own files."""
        predictor = fit(self._space, self._trials.values())
        if predictor is None or not self._allowed() or not self._objective.two_phases:
            return []
        sooner = until_ready(self._objective)
        every = sorted(self._every_plan(), key=lambda choice: predictor.cost(choice, sooner))
        alike = (choice for choice in every if shares_files(choice, second))
        found = (*every[:1], *itertools.islice(alike, 1))
        return [self._without_idle_changes(choice, sooner) for choice in found]

    def _works(self, choice: PlanChoice) -> bool:
        return choice in self._trials and self._trials[choice].failure is None

    def _without_idle_changes(self, choice: PlanChoice, objective: Objective) -> PlanChoice:
        """Returns the plan without the changes that are predicted to gain nothing beyond the noise."""
        predictor = fit(self._space, self._trials.values())
        factor = max(IDLE, 1 + self._noise())
        return choice if predictor is None else predictor.simplify(self._space, choice, objective, factor)
