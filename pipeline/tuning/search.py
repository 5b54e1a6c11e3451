"""The search for a plan: which plans are tried, how often, and when it is enough. No clock, disk or process.

The order: the default, the plain recipe and the base; every single change of the base; what the factors of
these predict to be best, as long as that is better than the best seen; every single change of the best plan,
since two changes may come to more or less than their factors; at last a sampler. Plans of one batch
race: every round measures the anchor (the default) and each of them once, in a changing order, and a plan
that is far behind after its first round is not measured again. The best few are then measured afresh.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.errors import PipelineError, TuningError
from pipeline.tuning.comparison import summarise
from pipeline.tuning.objective import Figures, Objective, Trial
from pipeline.tuning.prediction import Predictor, fit
from pipeline.tuning.race import Race
from pipeline.tuning.rounds import order_of_round
from pipeline.tuning.space import DEFAULT, RECIPE, Choice, Space

HOPELESS = 1.1
"""A plan that costs this much more than the best one in its first round is not measured again."""

BATCH = 4
"""Plans that race side by side: more would put minutes between a plan and its anchor."""

FINALISTS = 3
"""Plans that are measured afresh before one is chosen."""

REACH = 1.3
"""A change of the best plan that is predicted to cost so much more is not tried."""

IDLE = 1.005
"""A change that gains less than this is left out of the plan that is measured at last."""

PATIENCE = 2
"""Batches of the sampler without a gain beyond the noise after which no more is expected."""

MOST_ENUMERATED = 50_000
"""Largest space whose every plan is predicted; of a larger one, those near the best."""


@dataclass(frozen=True)
class Limits:
    """What a search may take.

    Attributes:
        budget_s: Seconds, the last comparison included; a batch that has begun is finished.
        max_trials: Plans; the default and the base are tried in any case.
        repeats: Processes per plan that is not hopeless.
        rounds: Processes per finalist.
    """

    budget_s: float
    max_trials: int
    repeats: int = 2
    rounds: int = 5


def _nothing(_: Trial) -> None:
    return None


@dataclass(frozen=True)
class Effects:
    """What a search does to the world.

    Attributes:
        measure: Measures a plan in a fresh process; a `PipelineError` is a failed trial.
        suggest: Has a sampler name a plan, given all trials; None if it has none.
        clock: Seconds, from any start.
        record: Told of every trial that is over.
        known: Trials of an earlier, interrupted run; they are not measured again.
        say: Takes a line of progress.
    """

    measure: Callable[[Choice], Figures]
    suggest: Callable[[Sequence[Trial]], Choice | None]
    clock: Callable[[], float]
    record: Callable[[Trial], None] = _nothing
    known: Mapping[Choice, Trial] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Found:
    """What a search found out.

    Attributes:
        trials: Every plan that was tried, in order.
        finals: Figures of the plans that were measured afresh, the k-th of each from the same round; the
            anchor is among them. A plan that failed then is absent.
        anchor: The plan all others are compared with.
        noise: Distance between the quartiles of the anchor's cost, relative to its median.
        ended: Why no more was tried.
        elapsed_s: What it took, interrupted runs included.
    """

    trials: tuple[Trial, ...]
    finals: Mapping[Choice, tuple[Figures, ...]]
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
        self._seconds: list[float] = []
        self._enumerated: tuple[Choice, ...] = ()

    def run(self) -> Found:
        self._begin()
        ended = self._explore()
        finals = self._measure_finals()
        return Found(
            trials=tuple(self._trials.values()),
            finals=finals,
            anchor=self._anchor,
            noise=self._noise(),
            ended=ended,
            elapsed_s=self._elapsed_s(),
        )

    def _begin(self) -> None:
        base = self._space.base
        self._try([DEFAULT], "default")
        if self._trials[DEFAULT].failure is not None:
            self._effects.say(f"default not measured: {self._trials[DEFAULT].failure}")
            self._anchor = base
        self._try([base], "base")
        failure = self._trials[self._anchor].failure
        if failure is not None:
            raise TuningError(f"nothing to compare with: neither the default nor the base runs\n  {failure}")
        self._try([RECIPE], "recipe")

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
        if len(self._trials) >= self._limits.max_trials:
            return f"{self._limits.max_trials} plans were tried"
        # The last comparison takes its part of the time too.
        each_s = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        if self._elapsed_s() + each_s * self._final_processes() >= self._limits.budget_s:
            return f"{self._limits.budget_s:g} s are over"
        return None

    def _final_processes(self) -> int:
        """Returns the most processes that the last comparison can take."""
        twins = sum(len(knob.settings) - 1 for knob in self._space.knobs if knob.changes_phase)
        plain = 1
        lanes = len((self._anchor, self._space.base)) + FINALISTS + plain + twins
        return self._limits.rounds * lanes + self._limits.repeats * (plain + twins + 1)

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
        for index in range(self._limits.repeats):
            running = [choice for choice in choices if race.runs(choice) and self._has_hope(race, choice)]
            if not running:
                break
            self._measure_round(race, running, index)
        for choice in choices:
            trial = race.trial(choice, number=len(self._trials), kind=kind)
            self._trials[choice] = trial
            self._effects.record(trial)
            self._report(trial)

    def _measure_round(self, race: Race, choices: Sequence[Choice], index: int) -> None:
        lanes = list(dict.fromkeys([self._anchor, *choices]))
        names = [str(position) for position in range(len(lanes))]
        for name in order_of_round(names, index):
            choice = lanes[int(name)]
            started = self._effects.clock()
            try:
                result: Figures | str = self._effects.measure(choice)
            except PipelineError as error:
                result = error.message
            elapsed_s = self._effects.clock() - started
            self._seconds.append(elapsed_s)
            race.add(choice, result, elapsed_s)
        race.close_round(choices)

    def _has_hope(self, race: Race, choice: Choice) -> bool:
        trial = race.trial(choice, number=0, kind="")
        if not trial.figures or choice == self._anchor or choice == self._space.base:
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
        anchors = {figures for trial in self._trials.values() for figures in trial.anchors}
        costs = [self._objective.cost_ms(figures) for figures in anchors]
        if len(costs) < 2:
            return 0.0
        spread = summarise(costs)
        return (spread.p75 - spread.p25) / spread.median if spread.median else 0.0

    def _promising(self) -> list[Choice]:
        """Returns the plans that are predicted to beat the best one that was seen, best first."""
        predictor = fit(self._space, self._trials.values())
        best = self._best_score()
        if predictor is None or best == float("inf"):
            return []
        cost = predictor.cost
        new = (choice for choice in self._reachable(predictor) if choice not in self._trials)
        nearest = heapq.nsmallest(BATCH - 1, new, key=lambda choice: cost(choice, self._objective))
        seen = min(cost(trial.choice, self._objective) for trial in self._allowed())
        return [choice for choice in nearest if cost(choice, self._objective) < min(best, seen) * 0.999]

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

    def _reachable(self, predictor: Predictor) -> Iterable[Choice]:
        if self._space.combinations <= MOST_ENUMERATED:
            self._enumerated = self._enumerated or tuple(self._space.choices())
            return self._enumerated
        start = min(self._allowed(), key=self._objective.score).choice
        return _near(self._space, start, lambda choice: predictor.cost(choice, self._objective))

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

    def _measure_finals(self) -> dict[Choice, tuple[Figures, ...]]:
        """Measures the best plans afresh, those included that differ from the best in how they begin."""
        lanes = self._finalists()
        self._effects.say(f"{len(self._trials)} plans tried; measuring {len(lanes)} of them afresh")
        race = Race(lanes, self._anchor)
        for index in range(self._limits.rounds):
            self._measure_round(race, [choice for choice in lanes if race.runs(choice)], index)
        return {choice: race.figures(choice) for choice in lanes if race.runs(choice)}

    def _finalists(self) -> list[Choice]:
        """Returns the plans of the last comparison; each of them is a trial that did not fail."""
        ranked = [trial.choice for trial in sorted(self._allowed(), key=self._objective.score)]
        plain = [self._without_idle_changes(choice) for choice in ranked[:1]]
        twins = [twin for choice in ranked[:1] for twin in find_twins(self._space, choice)]
        self._try([*plain, *twins], "final")
        lanes = dict.fromkeys([self._anchor, self._space.base, *ranked[:FINALISTS], *plain, *twins])
        tried = [self._trials[choice] for choice in lanes if choice in self._trials]
        return [trial.choice for trial in tried if trial.failure is None]

    def _without_idle_changes(self, choice: Choice) -> Choice:
        """Returns the plan without the changes that, by what was learnt, gain nothing."""
        predictor = fit(self._space, self._trials.values())
        base = self._space.base
        for knob in self._space.knobs:
            plainer = self._space.canonical(choice.but(knob.name, base[knob.name]))
            if predictor is not None and plainer != choice:
                costs = [predictor.cost(one, self._objective) for one in (plainer, choice)]
                choice = plainer if costs[0] <= costs[1] * IDLE else choice
        return choice


def find_twins(space: Space, choice: Choice) -> tuple[Choice, ...]:
    """Returns the plans over the same files that differ in how a session begins, not in how it is run."""
    changed = (
        space.canonical(choice.but(knob.name, value))
        for knob in space.knobs
        if knob.changes_phase
        for value in knob.values
    )
    files = [knob.name for knob in space.knobs if knob.shapes_file]
    same = (twin for twin in changed if all(twin[name] == choice[name] for name in files))
    return tuple(twin for twin in dict.fromkeys(same) if twin != choice)


def _near(space: Space, start: Choice, cost: Callable[[Choice], float]) -> tuple[Choice, ...]:
    """Returns plans near the predicted optimum: the neighbours of every step of a descent."""
    found: dict[Choice, None] = {start: None}
    here = start
    for _ in range(len(space.knobs)):
        around = space.neighbours(here)
        found |= dict.fromkeys(around)
        best = min((here, *around), key=cost)
        if best == here:
            break
        here = best
    return tuple(found)
