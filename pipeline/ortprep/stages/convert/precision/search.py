"""The search for the fewest nodes that must stay in the higher precision, in few trials.

A trial converts, runs and compares a whole model, so it takes seconds to minutes, and their number is what
counts. The search is Zeller and Hildebrandt's delta debugging ("Simplifying and Isolating Failure-Inducing
Input", 2002) with complements only: all nodes are kept; pieces of them, neighbours in topological order, are
given up as long as the gate holds; those that cannot be are halved, down to single nodes. What is kept after
any trial passes the gate, so the search may be ended at any of them, and the largest pieces come first.

The search assumes that subsets of a set that failed fail too. So if one half of a needed piece could be given
up, it does not try the other. For k nodes among n that have to stay, it tries at most about
2k · log2(n/k) + 4k sets, like QuickXplain, which has no result before its end. If the assumption is wrong,
the result may keep too many nodes, but it has passed the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

Kept = frozenset[str]
"""Names of the nodes that stay in the higher precision."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        kept: Nodes that have to stay, in the order given; None if no set that passes was found.
        trials: Sets that were tried.
    """

    kept: tuple[str, ...] | None
    trials: int


class _BudgetSpentError(Exception):
    """No more trials, or no more time."""


def search(
    nodes: Sequence[str],
    holds: Callable[[Kept], bool],
    *,
    max_trials: int,
    deadline: Callable[[], bool],
    say: Callable[[str], None],
) -> SearchResult:
    """Finds a small set of nodes to keep with which the gate holds.

    Tries no node, then all nodes, then subsets of the first that held. The order depends on the arguments and
    answers alone, so a search whose answers are kept can be replayed.

    Args:
        nodes: Names, each once, in topological order: neighbours are given up together.
        holds: Returns whether the gate holds if these nodes stay; called once per set.
        max_trials: How many sets may be tried.
        deadline: Returns whether time is up; called before each trial.
        say: Takes a line of progress after each trial.
    """
    oracle = _Oracle(holds, len(nodes), max_trials=max_trials, deadline=deadline, say=say)
    with suppress(_BudgetSpentError):
        if not oracle.holds(frozenset()) and oracle.holds(frozenset(nodes)):
            _give_up(nodes, oracle.holds)
    passed = oracle.passed
    kept = None if passed is None else tuple(node for node in nodes if node in passed)
    return SearchResult(kept, oracle.trials)


def _give_up(nodes: Sequence[str], holds: Callable[[Kept], bool]) -> None:
    """Removes pieces of the kept set, largest first, as long as the gate holds."""
    kept, waiting = frozenset(nodes), [nodes]
    while waiting:
        # The largest first: the search may end at any trial.
        waiting.sort(key=len, reverse=True)
        piece = waiting.pop(0)
        fewer = kept.difference(piece)
        if holds(fewer):
            kept = fewer
        else:
            waiting += _halve(piece)


def _halve(piece: Sequence[str]) -> tuple[Sequence[str], ...]:
    middle = len(piece) // 2
    return (piece[:middle], piece[middle:]) if middle else ()


class _Oracle:
    """Tries each set once, and never a subset of one that failed, within the budget.

    Attributes:
        trials: Number of sets that were tried.
        passed: The last set that held; None before any did.
    """

    def __init__(
        self,
        try_set: Callable[[Kept], bool],
        size: int,
        *,
        max_trials: int,
        deadline: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._try, self._size, self._say = try_set, size, say
        self._max_trials, self._deadline = max_trials, deadline
        self._failed: set[Kept] = set()
        self.trials = 0
        self.passed: Kept | None = None

    def holds(self, kept: Kept) -> bool:
        if kept == self.passed:
            return True
        if any(kept <= failed for failed in self._failed):
            return False
        if self.trials >= self._max_trials or self._deadline():
            raise _BudgetSpentError
        answer = self._try(kept)
        self.trials += 1
        if answer:
            self.passed = kept
        else:
            self._failed.add(kept)
        verdict = "passes" if answer else "does not pass"
        self._say(f"trial {self.trials}: keeping {len(kept)} of {self._size} nodes {verdict} the gate")
        return answer
