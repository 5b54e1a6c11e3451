"""The time budget of a search. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.tuning.objective import Trial
from ortprep.tuning.space import DEFAULT

FOR_THE_FINALS = 0.4
"""Most of the budget that is kept for the last comparison."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search.

    Attributes:
        budget_s: Seconds, the last comparison included. A started batch ends, and the default, two plans and
            one first-phase plan are always compared in three rounds.
        max_trials: Maximum number of plans; the default and the base are always tried.
        repeats: Processes per plan that is not hopeless.
        rounds: Maximum rounds of the last comparison.
    """

    budget_s: float
    max_trials: int
    repeats: int = 2
    rounds: int = 12


class TimeBudget:
    """Time spent and left; the time of an earlier, interrupted run counts."""

    def __init__(self, budget_s: float, clock: Callable[[], float], known: Iterable[Trial]) -> None:
        earlier = tuple(known)
        self._budget_s, self._clock, self._started_s = budget_s, clock, clock()
        self._spent_s = sum(trial.elapsed_s for trial in earlier)
        self._seconds = [process_s(trial) for trial in earlier if trial.figures]

    def add_process(self, seconds: float) -> None:
        """Counts a process that succeeded; one that hung says nothing about the others."""
        self._seconds.append(seconds)

    def elapsed_s(self) -> float:
        """Returns the seconds spent, those of interrupted runs included."""
        return self._spent_s + self._clock() - self._started_s

    def has_time(self, processes: int) -> bool:
        """Says whether that many more processes end within the budget."""
        return self.elapsed_s() + processes * self._process_s() <= self._budget_s

    def is_spent(self, finalists: int) -> bool:
        """Says whether the remaining time is needed to compare that many plans."""
        reserve_s = min(self._comparison_s(finalists), FOR_THE_FINALS * self._budget_s)
        return self.elapsed_s() + reserve_s >= self._budget_s

    def has_room_before(self, finalists: int, *, processes: int) -> bool:
        """Says whether that many processes end before that many plans must be compared."""
        return self._left_s() > self._comparison_s(finalists) + processes * self._process_s()

    def affordable_plans(self, most: int) -> int:
        """Returns how many plans there is time to compare, at most `most`."""
        left_s = max(self._left_s(), 0.0)
        return most if left_s >= self._comparison_s(most) else int(left_s / self._comparison_s(1))

    def _left_s(self) -> float:
        return self._budget_s - self.elapsed_s()

    def _process_s(self) -> float:
        return median(self._seconds) if self._seconds else 0.0

    def _comparison_s(self, plans: int) -> float:
        """Returns what the last comparison of so many plans takes at least."""
        return MIN_ROUNDS * plans * self._process_s()


def process_s(trial: Trial) -> float:
    """Returns the mean time of a trial's processes, the anchor's included."""
    return trial.elapsed_s / (len(trial.figures) or 1) / (1 if trial.choice == DEFAULT else 2)
