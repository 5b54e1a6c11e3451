"""The search for a plan: which plans are tried, how often, and when it ends. No clock, disk or process.

1. Default ONNX Runtime, the base, and the base without prepacking, which is often the best first phase.
2. Every form of the files with every kind of prepacking: these two decide most of what a plan costs.
3. Every single change of the best plan so far, again and again until none gains more than half the noise.
4. The best plans again, all in every round; `ortprep.tuning.final` chooses one of them.

Plans of one batch race: every round measures the baseline (the default) and each plan once, in a changing
order; a plan far behind after its first round is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import MIN_ROUNDS, order_of_round, run_interleaved
from ortprep.tuning.final import measure_with_retry, rank_firsts
from ortprep.tuning.objective import Finals, Objective, PlanSearchResult, Trial
from ortprep.tuning.space import DEFAULT, FORM, OFF, PREPACKING, PlanChoice, Space

MAX_FIRST_RATIO = 1.1
"""A plan that costs this much more than the best one in its first round is not measured again."""

BATCH = 4
"""Plans that race side by side; more would put minutes between a plan and its baseline."""

REPEATS = 2
"""Processes per plan that is not far behind, before the last comparison."""

FINALISTS = 3
"""Best plans that are compared again before one is chosen."""

MIN_DIFFERENCE_RATIO = 1.005
"""A plan with fewer changes that costs so much more, or more by the noise, is compared too."""

FINALS_SHARE = 0.4
"""Maximum share of the budget that is kept for the last comparison."""

MIN_DEADLINE_S = 30.0
MAX_SLOWDOWN = 10.0
"""A plan may take this many times what the slower of default and base took."""


@dataclass(frozen=True)
class SearchEffects:
    """Side effects of a search.

    Attributes:
        measure: Measures a plan in a fresh process, given its deadline in seconds (infinite while nothing is
            known); a `PipelineError` is a failed trial.
        clock: Seconds since any fixed instant.
        say: Reports a line to the user.
        prepare: Writes a plan's files before any plan of its batch is measured; `measure` repeats its errors.
    """

    measure: Callable[[PlanChoice, float], ProbeResult]
    clock: Callable[[], float]
    say: Callable[[str], None] = lambda _: None
    prepare: Callable[[PlanChoice], None] = lambda _: None


def search(space: Space, objective: Objective, effects: SearchEffects) -> PlanSearchResult:
    """Searches a space for the plan that costs a job least.

    A started batch ends; the default and the base are always tried, and the default, two plans and one
    first-phase plan are always compared in three rounds, even if no budget or trials are left.

    Raises:
        StageError: Neither the default nor the base could be measured.
    """
    return _Search(space, objective, effects).run()


class _Search:
    """The bookkeeping of one search."""

    def __init__(self, space: Space, objective: Objective, effects: SearchEffects) -> None:
        self._space, self._objective, self._effects = space, objective, effects
        self._trials: dict[PlanChoice, Trial] = {}
        self._baseline = DEFAULT
        self._started_s, self._deadline_s = effects.clock(), math.inf
        self._seconds: list[float] = []  # of each process that succeeded

    def run(self) -> PlanSearchResult:
        self._begin()
        self._explore()
        finals = self._compare_finalists()
        return PlanSearchResult(tuple(self._trials.values()), finals, self._baseline, self._elapsed_s())

    def _begin(self) -> None:
        """Tries the plans that the others are compared with, and the usual first phase."""
        self._race([DEFAULT])
        default = self._trials[DEFAULT]
        if default.failure is not None:
            self._effects.say(f"default not measured: {default.failure}")
            self._baseline = self._space.base
        changed = self._space.neighbours(self._space.base) if self._objective.first_phase else ()
        firsts = [choice for choice in changed if choice.as_dict().get(PREPACKING) == OFF]
        self._race([self._space.base, *firsts])
        base, slowest_s = self._trials[self._space.base], max(self._seconds, default=0.0)
        if default.failure is not None and base.failure is not None:
            raise StageError(
                f"nothing to compare with: neither the default nor the base runs\n  {base.failure}"
            )
        self._deadline_s = max(MIN_DEADLINE_S, MAX_SLOWDOWN * slowest_s)

    def _explore(self) -> None:
        """Tries forms, then single changes of the best plan, until nothing gains more than the noise."""
        self._try(self._forms())
        while self._may_try():
            scores = self._scores()
            best = min(scores, key=lambda choice: scores[choice], default=self._space.base)
            self._try(self._space.neighbours(best))
            # Half the noise is about the standard error of a plan's two rounds.
            if not self._best_score() < scores.get(best, math.inf) / (1 + self._noise() / 2):
                return

    def _scores(self) -> dict[PlanChoice, float]:
        """Returns the costs of the plans that work."""
        trials = ((choice, trial) for choice, trial in self._trials.items() if choice != DEFAULT)
        return {choice: self._objective.score(trial) for choice, trial in trials if trial.failure is None}

    def _best_score(self) -> float:
        return min(self._scores().values(), default=math.inf)

    def _forms(self) -> list[PlanChoice]:
        """Returns every form of the base with every kind of prepacking, those with one change first."""
        knobs = self._space.knobs
        choices = [
            self._space.canonical(self._space.base.but(FORM, form).but(PREPACKING, prepacking))
            for form in knobs.get(FORM, ("",))
            for prepacking in knobs.get(PREPACKING, ("",))
        ]
        return sorted(dict.fromkeys(choices), key=lambda choice: len(self._changes(choice)))

    def _changes(self, choice: PlanChoice) -> set[tuple[str, str]]:
        return set(choice.values) - set(self._space.base.values)

    def _try(self, choices: Iterable[PlanChoice]) -> None:
        """Races new plans in batches, as long as plans may be tried."""
        new = [choice for choice in choices if choice not in self._trials]
        while self._may_try() and (new := [choice for choice in new if not self._will_fail(choice)]):
            self._race(new[:BATCH])
            new = new[BATCH:]

    def _will_fail(self, choice: PlanChoice) -> bool:
        """Says whether a plan has every change of one that failed; a hang takes its whole deadline."""
        failed = [self._changes(one) for one, trial in self._trials.items() if trial.failure is not None]
        return any(changes and changes <= self._changes(choice) for changes in failed)

    def _may_try(self) -> bool:
        """Returns whether another plan may be tried, with time left for the last comparison."""
        if len(self._trials) >= self._objective.max_trials:
            return False
        if all(trial.failure is not None for choice, trial in self._trials.items() if choice != DEFAULT):
            return True  # there is nothing to prepare yet
        finalists = min(len((self._baseline, self._space.base)) + FINALISTS, len(self._trials))
        reserve_s = min(finalists * MIN_ROUNDS * self._process_s(), FINALS_SHARE * self._objective.budget_s)
        return self._elapsed_s() + reserve_s < self._objective.budget_s

    def _race(self, choices: Sequence[PlanChoice]) -> None:
        """Measures plans in rounds; one that fails, or is far behind, leaves the batch."""
        room = max(self._objective.max_trials, len((DEFAULT, self._space.base))) - len(self._trials)
        batch = [
            Trial(len(self._trials) + index, choice) for index, choice in enumerate(choices[: max(room, 0)])
        ]
        for trial in batch:
            with suppress(PipelineError):
                self._effects.prepare(trial.choice)
        for index in range(REPEATS):
            running = [trial for trial in batch if self._is_worth_another(trial)]
            if running:
                self._measure_round(running, index)
        for trial in batch:
            self._trials[trial.choice] = trial
            if trial.failure is not None:
                reason = trial.failure.splitlines()[0]
                self._effects.say(f"trial {trial.number} failed: {trial.choice}: {reason}")

    def _measure_round(self, running: Sequence[Trial], index: int) -> None:
        """Measures plans and the baseline once; where that fails, its last figures count."""
        results: dict[PlanChoice, ProbeResult | str] = {}
        choices = dict.fromkeys([self._baseline, *(trial.choice for trial in running)])
        for choice in order_of_round(list(choices), index):
            try:
                results[choice] = measure_with_retry(self._measure, choice)
            except PipelineError as error:
                results[choice] = error.message
        baseline = results[self._baseline]
        if isinstance(baseline, str):
            tried = (*self._trials.values(), *running)
            earlier = [figures for trial in tried for figures in trial.baselines]
            baseline = earlier[-1] if earlier else f"nothing to compare with: {baseline}"
        for trial in running:
            own = results[trial.choice]
            if isinstance(own, str) or isinstance(baseline, str):
                trial.failure = own if isinstance(own, str) else str(baseline)
            else:
                trial.figures.append(own)
                trial.baselines.append(baseline)

    def _measure(self, choice: PlanChoice) -> ProbeResult:
        started_s = self._effects.clock()
        figures = self._effects.measure(choice, self._deadline_s)
        self._seconds.append(self._effects.clock() - started_s)
        return figures

    def _is_worth_another(self, trial: Trial) -> bool:
        """Says whether a plan is worth another process."""
        if trial.failure is not None:
            return False
        if not trial.figures or trial.choice in (self._baseline, self._space.base):
            return True
        return self._objective.score(trial) < MAX_FIRST_RATIO * self._best_score()

    def _noise(self) -> float:
        """Returns the distance between the quartiles of a plan's cost relative to the baseline's."""
        others = (trial for choice, trial in self._trials.items() if choice != self._baseline)
        ratios = [self._objective.ratios(trial.figures, trial.baselines)[:2] for trial in others]
        gaps = [abs(math.log(pair[0] / pair[1])) for pair in ratios if len(pair) == 2 and min(pair) > 0]
        # Of a normal distribution the median gap of two values is 0.954 standard deviations, the quartiles
        # 1.349.
        return 1.349 / 0.954 * median(gaps) if gaps else 0.0

    def _compare_finalists(self) -> Finals:
        """Compares the best plans again, with the first-phase candidates."""
        trials, scores = self._trials, self._scores()
        # One process is not exact: a plan just beyond a limit is measured again after those that keep it.
        beyond = {choice: not self._objective.keeps_limits(trials[choice]) for choice in scores}
        best = sorted(scores, key=lambda choice: (beyond[choice], scores[choice]))
        limit = max(MIN_DIFFERENCE_RATIO, 1 + self._noise()) * scores[best[0]] if best else 0.0
        level = [one for one in best if scores[one] <= limit and beyond[one] == beyond[best[0]]]
        plain = min(level, key=lambda choice: len(self._changes(choice)), default=self._space.base)
        plans = [one for one in (*best[:1], plain, self._space.base, *best[1:FINALISTS]) if one in scores]
        plans = list(dict.fromkeys(plans))
        firsts = rank_firsts(trials.values(), plans, self._objective)
        # What there is no time for is left out from the end: never the two best and a first phase.
        entrants = dict.fromkeys((*plans[:2], *firsts[:1], *plans[2:], *firsts[1:]))
        plan_s = MIN_ROUNDS * self._process_s()
        affordable = max(self._left_s(), 0.0) / max(plan_s, 1e-9) - 1
        plans = list(entrants)[: max(3, int(min(len(entrants), affordable)))]
        compared = list(dict.fromkeys((self._baseline, *plans)))
        self._effects.say(f"{len(trials)} plans tried; comparing {len(compared)} of them again")
        return run_interleaved(
            compared,
            lambda choice: measure_with_retry(self._measure, choice),
            max_rounds=self._objective.rounds,
            budget_s=self._left_s() - len(compared) * self._process_s(),
            clock=self._effects.clock,
        ).rounds

    def _elapsed_s(self) -> float:
        return self._effects.clock() - self._started_s

    def _left_s(self) -> float:
        return self._objective.budget_s - self._elapsed_s()

    def _process_s(self) -> float:
        """Returns the usual time of a process; one that hung says nothing about the others."""
        return median(self._seconds) if self._seconds else 0.0
