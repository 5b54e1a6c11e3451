"""The search for the fewest nodes that must stay in the higher precision, in few trials.

A trial converts, runs and compares a whole model, so it takes seconds to minutes, and their number is what
counts. The search is Zeller and Hildebrandt's delta debugging ("Simplifying and Isolating Failure-Inducing
Input", 2002) with complements only: all nodes are kept; pieces of them, neighbours in the order given, are
given up as long as the gate holds; those that cannot be are halved, down to single nodes. What is kept after
any trial passes the gate, so the search may be ended at any of them, and the largest pieces come first.

If the nodes are ranked by their errors, all but the last one are the first piece, all but the last four the
second, and so on: a right ranking needs few trials, and a wrong one costs one each time that the set grows.

The search assumes that subsets of a set that failed fail too. So if one half of a needed piece could be given
up, it does not try the other. For k nodes among n that have to stay, it tries at most about
2k · log2(n/k) + 4k sets, like QuickXplain, which has no result before its end. If the assumption is wrong,
the result may keep too many nodes, but it has passed the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Kept = frozenset[str]
"""Names of the nodes that stay in the higher precision."""

_GROWTH = 4
"""Ratio of ranked nodes that are kept to those of the trial before, until the gate holds."""


def search(
    nodes: Sequence[str],
    holds: Callable[[Kept], bool],
    *,
    max_trials: int,
    expired: Callable[[], bool],
    is_ranked: bool = False,
) -> tuple[Kept, int]:
    """Finds a small set of nodes to keep with which the gate holds; all of them if there is no smaller one.

    The gate must fail if no node is kept, and hold if all are: neither is tried.

    Args:
        nodes: Names, each once: neighbours are given up together, the first ones first.
        holds: Returns whether the gate holds if these nodes stay; called once per set.
        max_trials: How many sets may be tried.
        expired: Returns whether time is up; called before each trial.
        is_ranked: Whether nodes are ordered by the error that each makes, the smallest first.

    Returns:
        The nodes to keep, and the number of sets that were tried.
    """
    kept, pieces, failed, trials = frozenset(nodes), [(0, len(nodes))], [Kept()], 0
    while pieces and trials < max_trials and not expired():
        start, stop = pieces.pop(max(range(len(pieces)), key=lambda at: pieces[at][1] - pieces[at][0]))
        fewer = kept.difference(nodes[start:stop])
        if not any(fewer <= one for one in failed):
            trials += 1
            if holds(fewer):
                kept = fewer
                continue
            failed.append(fewer)
        middle = (start + stop) // 2
        if is_ranked and not start:
            middle = max(middle, len(nodes) - max(1, _GROWTH * (len(nodes) - stop)))
        pieces += [(start, middle), (middle, stop)] if stop - start > 1 else []
    return kept, trials
