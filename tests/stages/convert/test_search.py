"""What a search keeps passes the gate, whenever it ends; and few trials find it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ortprep.stages.convert.search import Kept, search

Holds = Callable[[Kept], bool]


def name_nodes(count: int) -> tuple[str, ...]:
    return tuple(f"/layer{i}/MatMul" for i in range(count))


def never() -> bool:
    return False


class Gate:
    """Asked about a set of nodes; what it was asked is remembered, and nothing may be asked twice."""

    def __init__(self, holds: Holds) -> None:
        self.holds = holds
        self.asked: list[Kept] = []

    def __call__(self, kept: Kept) -> bool:
        assert kept not in self.asked
        self.asked.append(kept)
        return self.holds(kept)


def find(nodes: Sequence[str], holds: Holds, *, max_trials: int = 10_000) -> tuple[Kept, int]:
    return search(nodes, holds, max_trials=max_trials, expired=never)


def needs(culprits: Collection[str]) -> Holds:
    return frozenset(culprits).issubset


NODES = st.integers(0, 40).map(name_nodes)


@st.composite
def monotone(draw: st.DrawFn) -> tuple[tuple[str, ...], Holds]:
    """A gate that holds if any of some sets is kept, or if what is given up does not weigh too much."""
    nodes = draw(NODES)
    sets = st.frozensets(st.sampled_from(nodes)) if nodes else st.just(frozenset[str]())
    either = draw(st.lists(sets, min_size=1, max_size=3))
    weights = {node: draw(st.integers(0, 9)) for node in nodes}
    allowed = draw(st.integers(0, 60))

    def holds(kept: Kept) -> bool:
        lost = sum(weight for node, weight in weights.items() if node not in kept)
        return bool(kept) and any(some <= kept for some in either) and lost <= allowed

    return nodes, holds


@given(monotone())
def test_nothing_more_can_be_given_up_of_what_is_kept(case):
    nodes, holds = case
    kept, _ = find(nodes, Gate(holds))
    assert kept == frozenset(nodes) or holds(kept)
    assert not any(holds(kept - {node}) for node in kept)


@given(NODES, st.data(), st.integers(0, 30))
def test_what_is_kept_holds_however_strange_the_gate_and_small_the_budget(nodes, data, max_trials):
    seed = data.draw(st.integers(0, 1000))
    gate = Gate(lambda kept: hash((seed, len(kept), sum(map(nodes.index, kept)))) % 3 > 0)
    kept, trials = find(nodes, gate, max_trials=max_trials)
    assert trials == len(gate.asked) <= max_trials
    assert frozenset() not in gate.asked
    assert kept == frozenset(nodes) or (kept in gate.asked and gate.holds(kept))


def test_of_two_halves_one_is_not_tried_if_the_other_could_be_given_up():
    nodes = name_nodes(512)
    assert find(nodes, Gate(needs(nodes[-1:]))) == (frozenset(nodes[-1:]), 9)
    assert find(nodes, Gate(needs(nodes[255::256]))) == (frozenset(nodes[255::256]), 2 + 2 * 8)


@given(st.integers(6, 600), st.sets(st.integers(0, 599), min_size=1, max_size=6))
def test_scattered_culprits_take_a_logarithm_of_trials_each(count, places):
    nodes = name_nodes(count)
    culprits = frozenset(nodes[place % count] for place in places)
    (kept, trials), many = find(nodes, Gate(needs(culprits))), len(culprits)
    assert kept == culprits
    assert trials <= 2 * many * math.log2(count / many) + 4 * many


def test_a_search_ends_when_its_time_is_up():
    nodes, asked = name_nodes(100), Gate(needs(name_nodes(3)))
    assert search(nodes, asked, max_trials=1000, expired=lambda: len(asked.asked) >= 5)[1] == 5
    assert search(nodes, asked, max_trials=1000, expired=lambda: True) == (frozenset(nodes), 0)
