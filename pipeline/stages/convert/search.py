"""Which nodes have to stay in the higher precision? The fewest that pass the gate, in the fewest trials.

A trial converts, runs and compares a whole model, so it takes seconds to minutes, and their number is what
counts. The search is Zeller and Hildebrandt's delta debugging ("Simplifying and Isolating Failure-Inducing
Input", 2002) with complements only: all nodes are kept; pieces of them, neighbours in topological order, are
given up as long as the gate holds; those that cannot be are halved, down to single nodes. What is kept after
any trial passes the gate, so the search may be ended at any of them, and the largest pieces come first.

Of sets within one that failed, the search assumes that they fail too. So of the halves of a piece that is
needed, one is not tried if the other could be given up, and for k nodes among n that have to stay, at
most about 2k · log2(n/k) + 4k sets are tried, as by QuickXplain, which has nothing to show before its end.
Where the assumption is right, no node of what is kept can be given up; where it is not, some might be, and
what is kept has passed all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Kept = frozenset[str]
"""Names of the nodes that stay in the higher precision."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        kept: Nodes that have to stay, in the order given; None if no set that passes was found.
        trials: Sets that were tried.
        finished: Whether the search came to its end; with `kept` None, that not even all nodes suffice.
    """

    kept: tuple[str, ...] | None
    trials: int
    finished: bool


class _BudgetSpentError(Exception):
    """No more trials, or no more time."""


def search(
    nodes: Sequence[str],
    holds: Callable[[Kept], bool],
    *,
    max_trials: int,
    deadline: Callable[[], bool],
    say: Callable[[str], None],
    suspects: Collection[str] = (),
) -> Found:
    """Finds a small set of nodes to keep with which the gate holds.

    Tried are, in this order, no node, the suspects, and all nodes; then subsets of the first that held. The
    order depends on the arguments and answers alone, so a search whose answers are kept can be replayed.

    Args:
        nodes: Names, each once, in topological order: neighbours are given up together.
        holds: Says whether the gate holds if these nodes stay. No set is asked about twice.
        max_trials: How many sets may be tried.
        deadline: Says whether time is up; asked before each trial.
        say: Takes a line of progress after each trial.
        suspects: Nodes believed to be the culprits; names that are not among `nodes` do not matter.
    """
    oracle = _Oracle(holds, len(nodes), max_trials=max_trials, deadline=deadline, say=say)
    try:
        _search(nodes, frozenset(nodes).intersection(suspects), oracle.holds)
    except _BudgetSpentError:
        finished = False
    else:
        finished = True
    passed = oracle.passed
    kept = None if passed is None else tuple(node for node in nodes if node in passed)
    return Found(kept, oracle.trials, finished)


def _search(nodes: Sequence[str], suspected: Kept, holds: Callable[[Kept], bool]) -> None:
    """Asks about set after set; each that holds is within the one that held before."""
    starts = (frozenset[str](), suspected, frozenset(nodes))
    start = next((start for start in starts if holds(start)), None)
    if start:
        # What nobody suspects is given up first, so that little of the budget goes to the culprits.
        parts = (start - suspected, start & suspected)
        _give_up(start, [[node for node in nodes if node in part] for part in parts if part], holds)


def _give_up(kept: Kept, pieces: Sequence[Sequence[str]], holds: Callable[[Kept], bool]) -> None:
    waiting = list(pieces)
    while waiting:
        # The largest, and the first of those: what a budget pays for is to be worth most at any time.
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
    """Asks about each set once, and about none within one that failed, as long as the budget lasts.

    Attributes:
        trials: Sets that were asked about.
        passed: The last set that held; None before any did.
    """

    def __init__(
        self,
        ask: Callable[[Kept], bool],
        size: int,
        *,
        max_trials: int,
        deadline: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._ask, self._size, self._say = ask, size, say
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
        answer = self._ask(kept)
        self.trials += 1
        if answer:
            self.passed = kept
        else:
            self._failed.add(kept)
        verdict = "passes" if answer else "does not pass"
        self._say(f"trial {self.trials}: keeping {len(kept)} of {self._size} nodes {verdict} the gate")
        return answer
