"""The search for a plan: which plans are tried, how often, and when it is enough. No clock, disk or process.

The order: the default, the plain recipe, the base, and the base without prepacking, which is what is ready
soonest of most models and may serve first; every single change of the base; what the factors of
these predict to be best, as long as that is better than what is predicted of those seen; every single change
of the best plan, since two changes may come to more or less than their factors; at last a sampler. Plans of
one batch race: every round measures the anchor (the default) and each of them once, in a changing order, and
a plan that is far behind after its first round is not measured again. The best few are then compared afresh.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

from pipeline.errors import PipelineError, TuningError
from pipeline.measuring.comparison import LEAST_ROUNDS
from pipeline.measuring.rounds import order_of_round
from pipeline.tuning.final import compare_afresh, measure_leniently, pick_lanes
from pipeline.tuning.knobs import OFF, PREPACKING, shares_files
from pipeline.tuning.objective import Figures, Finals, Objective, Trial
from pipeline.tuning.phases import rank_firsts, until_ready
from pipeline.tuning.prediction import Predictor, descend, fit
from pipeline.tuning.race import Race
from pipeline.tuning.space import DEFAULT, RECIPE, Choice, Space

HOPELESS = 1.1
"""A plan that costs this much more than the best one in its first round is not measured again."""

BATCH = 4
"""Plans that race side by side: more would put minutes between a plan and its anchor."""

FINALISTS = 3
"""Best plans that are compared afresh before one is chosen."""

REACH = 1.3
"""A change of the best plan that is predicted to cost so much more is not tried."""

IDLE = 1.005
"""Changes that together gain less than this, or than the noise, are left out of a plan compared at last."""

PATIENCE = 2
"""Batches of the sampler without a gain beyond the noise after which no more is expected."""

FOR_THE_FINALS = 0.4
"""Most of the budget that is kept for the last comparison."""

LEAST_DEADLINE_S = 30.0
PATIENT = 10.0
"""A plan may take this many times what the slowest of default and base took; what hangs is noticed then."""

MOST_ENUMERATED = 50_000
"""Largest space whose every plan is predicted; of a larger one, those near the best."""


@dataclass(frozen=True)
class Limits:
    """What a search may take.

    Attributes:
        budget_s: Seconds, the last comparison included. A batch that has begun is finished, and the default,
            two plans and one that may serve first are compared in three rounds in any case.
        max_trials: Plans; the default and the base are tried in any case.
        repeats: Processes per plan that is not hopeless.
        rounds: Most rounds of the last comparison.
    """

    budget_s: float
    max_trials: int
    repeats: int = 2
    rounds: int = 12


def _nothing(_: Trial) -> None:
    return None


@dataclass(frozen=True)
class Effects:
    """What a search does to the world.

    Attributes:
        measure: Measures a plan in a fresh process, given the seconds after which it is taken for hung
            (infinite while nothing is known); a `PipelineError` is a failed trial.
        suggest: Has a sampler name a plan, given all trials; None if it has none.
        clock: Seconds, from any start.
        record: Told of every trial that is over.
        known: Trials of an earlier, interrupted run; they are not measured again.
        say: Takes a line of progress.
        prepare: Makes a plan's files, before any plan of its batch is measured; what it raises, `measure`
            will raise again.
    """

    measure: Callable[[Choice, float], Figures]
    suggest: Callable[[Sequence[Trial]], Choice | None]
    clock: Callable[[], float]
    record: Callable[[Trial], None] = _nothing
    known: Mapping[Choice, Trial] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    prepare: Callable[[Choice], None] = lambda _: None


@dataclass(frozen=True)
class Found:
    """What a search found out.

    Attributes:
        trials: Every plan that was tried, in order.
        finals: Figures of the plans that were compared afresh, those of the anchor among them. A plan that
            failed then is absent; an anchor that did has the rounds before, if any.
        anchor: The plan all others are compared with.
        noise: Distance between the quartiles of a plan's cost relative to the anchor's in the same round.
        ended: Why no more was tried.
        elapsed_s: What it took, interrupted runs included.
    """

    trials: tuple[Trial, ...]
    finals: Finals
    anchor: Choice
    noise: float
    ended: str
    elapsed_s: float


def search(space: Space, objective: Objective, limits: Limits, effects: Effects) -> Found:
    """Searches a space for the plan that costs a job least.

    Args:
        space: What can be chosen.
        objective: What a plan costs and must not exceed.
        limits: What the search may take.
        effects: How plans are measured and trials remembered.

    Raises:
        TuningError: Neither the default nor the base could be measured.
    """
    return _Search(space, objective, limits, effects).run()


class _Search:
    """The bookkeeping of one search."""

    def __init__(self, space: Space, objective: Objective, limits: Limits, effects: Effects) -> None:
        self._space, self._objective, self._limits, self._effects = space, objective, limits, effects
        self._trials: dict[Choice, Trial] = {}
        self._anchor = DEFAULT
        self._started = effects.clock()
        self._spent_s = sum(trial.elapsed_s for trial in effects.known.values())
        self._seconds = [_process_s(trial) for trial in effects.known.values() if trial.figures]
        self._deadline_s = math.inf
        self._enumerated: tuple[Choice, ...] = ()

    def run(self) -> Found:
        self._begin()
        ended = self._explore()
        self._take_up_the_rest()
        finals = self._compare_finalists()
        return Found(
            trials=tuple(self._trials.values()),
            finals=finals,
            anchor=self._anchor,
            noise=self._noise(),
            ended=ended,
            elapsed_s=self._elapsed_s(),
        )

    def _begin(self) -> None:
        """Tries what the others are compared with."""
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
        known = [_process_s(self._trials[choice]) for choice in (DEFAULT, base) if self._works(choice)]
        self._deadline_s = max(LEAST_DEADLINE_S, PATIENT * max(known))
        self._try([RECIPE], "recipe")

    def _known_firsts(self) -> list[Choice]:
        """Returns the change of the base that is ready soonest of most models, and may serve first."""
        changed = self._space.neighbours(self._space.base) if self._objective.two_phases else ()
        return [choice for choice in changed if choice.as_dict().get(PREPACKING) == OFF]

    def _take_up_the_rest(self) -> None:
        """Counts what an earlier run tried and this one, ended sooner, did not come to."""
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
        return "the expected gain is under the noise"

    def _next_batch(self) -> tuple[str, Sequence[Choice]]:
        if singles := self._new(self._space.neighbours(self._space.base)):
            return "screening", singles[:BATCH]
        if promising := self._promising():
            return "combination", promising
        if around := self._around_best():
            return "screening", around[:BATCH]
        return "sampler", self._sampled()

    def _new(self, choices: Iterable[Choice]) -> list[Choice]:
        return [choice for choice in choices if choice not in self._trials]

    def _exhausted(self) -> str | None:
        # Some of the plans that are compared at last may be new.
        kept = min(FINALISTS, self._limits.max_trials // 8)
        if len(self._trials) >= self._limits.max_trials - kept:
            return f"max_trials, {self._limits.max_trials}, is reached, or kept for the last comparison"
        if not self._works(self._space.base) and self._new(self._space.neighbours(self._space.base)):
            return None  # there may be nothing to prepare yet
        reserve_s = min(self._finals_s(), FOR_THE_FINALS * self._limits.budget_s)
        if self._elapsed_s() + reserve_s >= self._limits.budget_s:
            return f"{self._limits.budget_s:g} s are spent, or kept for the last comparison"
        return None

    def _process_s(self) -> float:
        """Returns what a process takes; one that hung says nothing about the others."""
        return median(self._seconds) if self._seconds else 0.0

    def _finals_s(self) -> float:
        """Returns what the last comparison takes at least."""
        plans = min(len((self._anchor, self._space.base)) + FINALISTS, len(self._trials))
        return LEAST_ROUNDS * plans * self._process_s()

    def _elapsed_s(self) -> float:
        return self._spent_s + self._effects.clock() - self._started

    def _try(self, choices: Iterable[Choice], kind: str) -> None:
        choices = dict.fromkeys(choices)
        for choice in [choice for choice in self._new(choices) if choice in self._effects.known]:
            self._trials[choice] = replace(self._effects.known[choice], number=len(self._trials))
        new = self._new(choices)
        room = max(self._limits.max_trials, len((self._anchor, self._space.base))) - len(self._trials)
        if room > 0 and new:
            self._race(new[:room], kind)

    def _race(self, choices: Sequence[Choice], kind: str) -> None:
        """Measures plans in rounds; one that fails, or is hopeless, leaves the race."""
        race = Race(choices, self._anchor)
        for choice in choices:
            started = self._effects.clock()
            with suppress(PipelineError):
                self._effects.prepare(choice)
            race.spend(choice, self._effects.clock() - started)
        for index in range(self._limits.repeats):
            running = [choice for choice in choices if race.runs(choice) and self._has_hope(race, choice)]
            if not running:
                break
            self._measure_round(race, running, index)
        kinds = {self._space.base: "base", RECIPE: "recipe"}
        for choice in choices:
            trial = race.trial(choice, number=len(self._trials), kind=kinds.get(choice, kind))
            self._trials[choice] = trial
            self._effects.record(trial)
            self._report(trial)

    def _measure_round(self, race: Race, choices: Sequence[Choice], index: int) -> None:
        for choice in order_of_round(list(dict.fromkeys([self._anchor, *choices])), index):
            started = self._effects.clock()
            try:
                result: Figures | str = measure_leniently(self._measure, choice)
            except PipelineError as error:
                result = error.message
            race.spend(choice, self._effects.clock() - started)
            race.add(choice, result)
        race.close_round(choices)

    def _measure(self, choice: Choice) -> Figures:
        started = self._effects.clock()
        figures = self._effects.measure(choice, self._deadline_s)
        self._seconds.append(self._effects.clock() - started)
        return figures

    def _has_hope(self, race: Race, choice: Choice) -> bool:
        trial = race.trial(choice, number=0, kind="")
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

    def _promising(self) -> list[Choice]:
        """Returns the plans that are predicted to beat what is predicted of those seen, best first.

        What was measured is no measure for that: of many noisy scores the best is too good to be true.
        """
        predictor = fit(self._space, self._trials.values())
        if predictor is None or not self._allowed():
            return []
        cost = predictor.cost
        new = (choice for choice in self._reachable(predictor, self._objective) if choice not in self._trials)
        nearest = heapq.nsmallest(BATCH - 1, new, key=lambda choice: cost(choice, self._objective))
        seen = min(cost(trial.choice, self._objective) for trial in self._allowed())
        return [choice for choice in nearest if cost(choice, self._objective) < seen * 0.999]

    def _around_best(self) -> list[Choice]:
        """Returns the single changes of the best plan that were not tried, by their predicted cost."""
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

    def _reachable(self, predictor: Predictor, objective: Objective) -> Iterable[Choice]:
        if self._space.combinations <= MOST_ENUMERATED:
            self._enumerated = self._enumerated or tuple(self._space.choices())
            return self._enumerated
        start = min(self._allowed(), key=objective.score).choice
        return descend(self._space, start, lambda choice: predictor.cost(choice, objective))

    def _sampled(self) -> list[Choice]:
        batch: list[Choice] = []
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
        """Compares the best plans afresh, with those that are ready soonest and may serve before them."""
        allowed = sorted(self._allowed(), key=self._objective.score)
        strict = [trial.choice for trial in allowed if self._objective.keeps_limits(trial)]
        ranked = list(dict.fromkeys([*(trial.choice for trial in allowed[:1]), *strict]))
        plain = self._without_idle_changes(ranked[0], self._objective) if ranked else self._space.base
        if self._has_room_for_more():
            self._try([plain, *self._predicted_firsts(plain)], "final")
        lanes = pick_lanes(
            self._anchor,
            # The best comes first, and what there is no time for is left out from the end.
            [one for one in (*ranked[:1], plain, self._space.base, *ranked[1:FINALISTS]) if self._works(one)],
            rank_firsts(self._trials.values(), plain, self._objective),
            most=self._affordable(),
        )
        self._effects.say(f"{len(self._trials)} plans tried; comparing {len(lanes.all)} of them afresh")

        def has_time(processes: int) -> bool:
            return self._elapsed_s() + processes * self._process_s() <= self._limits.budget_s

        return compare_afresh(
            lanes, self._objective, most_rounds=self._limits.rounds, measure=self._measure, has_time=has_time
        )

    def _predicted_firsts(self, second: Choice) -> list[Choice]:
        """Returns the plan that is predicted to be ready soonest, and the one that needs no further files."""
        predictor = fit(self._space, self._trials.values())
        if predictor is None or not self._allowed() or not self._objective.two_phases:
            return []
        sooner = until_ready(self._objective)
        every = sorted(self._reachable(predictor, sooner), key=lambda choice: predictor.cost(choice, sooner))
        alike = (choice for choice in every if shares_files(choice, second))
        found = (*every[:1], *itertools.islice(alike, 1))
        return [self._without_idle_changes(choice, sooner) for choice in found]

    def _works(self, choice: Choice) -> bool:
        return choice in self._trials and self._trials[choice].failure is None

    def _has_room_for_more(self) -> bool:
        left_s = self._limits.budget_s - self._elapsed_s()
        return left_s > self._finals_s() + 3 * self._limits.repeats * self._process_s()

    def _affordable(self) -> int:
        """Returns how many plans there is time to compare."""
        left_s = max(self._limits.budget_s - self._elapsed_s(), 0.0)
        each_s = LEAST_ROUNDS * self._process_s()
        return len(self._trials) if left_s >= len(self._trials) * each_s else int(left_s / each_s)

    def _without_idle_changes(self, choice: Choice, objective: Objective) -> Choice:
        """Returns the plan without the changes that, by what was learnt, gain nothing beyond the noise."""
        predictor = fit(self._space, self._trials.values())
        factor = max(IDLE, 1 + self._noise())
        return choice if predictor is None else predictor.simplify(self._space, choice, objective, factor)


def _process_s(trial: Trial) -> float:
    """Returns what a process of a trial took, those of the plan compared with counted in."""
    return trial.elapsed_s / (len(trial.figures) or 1) / (1 if trial.choice == DEFAULT else 2)
