"""What a search keeps passes the gate, whenever it ends; and few trials find it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.stages.convert.precision.journal import TrialsJournal
from ortprep.stages.convert.precision.search import Kept, SearchResult, search

Holds = Callable[[Kept], bool]


def name_nodes(count: int) -> tuple[str, ...]:
    return tuple(f"/layer{i}/MatMul" for i in range(count))


NAMES = ("b", "ü", *name_nodes(20))
KEPT = frozenset(NAMES)


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


def find(nodes: Sequence[str], holds: Holds, *, max_trials: int = 10_000) -> SearchResult:
    return search(nodes, holds, max_trials=max_trials, deadline=never, say=lambda _: None)


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
        return any(some <= kept for some in either) and lost <= allowed

    return nodes, holds


@given(monotone())
def test_nothing_more_can_be_given_up_of_what_is_kept(case: tuple[tuple[str, ...], Holds]) -> None:
    nodes, holds = case
    found = find(nodes, Gate(holds))
    assert found.kept is not None
    assert found.kept == tuple(node for node in nodes if node in found.kept)
    assert holds(frozenset(found.kept))
    assert not any(holds(frozenset(found.kept) - {node}) for node in found.kept)


@given(NODES, st.data(), st.integers(0, 30))
def test_what_is_kept_holds_however_strange_the_gate_and_small_the_budget(
    nodes: tuple[str, ...], data: st.DataObject, max_trials: int
) -> None:
    gate = Gate(lambda kept: hash((seed, len(kept), sum(map(nodes.index, kept)))) % 3 > 0)
    seed = data.draw(st.integers(0, 1000))
    found = find(nodes, gate, max_trials=max_trials)
    assert found.trials == len(gate.asked) <= max_trials
    if found.kept is not None:
        assert frozenset(found.kept) in gate.asked
        assert gate.holds(frozenset(found.kept))


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_a_model_that_needs_nothing_takes_one_trial(count: int) -> None:
    assert find(name_nodes(count), Gate(lambda _: True)) == SearchResult((), 1)


@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_model_that_nothing_helps_takes_two_trials(count: int) -> None:
    assert find(name_nodes(count), Gate(lambda _: False)) == SearchResult(None, 2)


def test_of_two_halves_one_is_not_tried_if_the_other_could_be_given_up() -> None:
    nodes = name_nodes(512)
    assert find(nodes, Gate(needs(nodes[-1:]))) == SearchResult(nodes[-1:], 2 + 9)
    assert find(nodes, Gate(needs(nodes[255::256]))) == SearchResult(nodes[255::256], 2 + 2 + 2 * 8)


@given(st.integers(6, 600), st.sets(st.integers(0, 599), min_size=1, max_size=6))
def test_scattered_culprits_take_a_logarithm_of_trials_each(count: int, places: set[int]) -> None:
    nodes = name_nodes(count)
    culprits = frozenset(nodes[place % count] for place in places)
    found, many = find(nodes, Gate(needs(culprits))), len(culprits)
    assert frozenset(found.kept or ()) == culprits
    assert found.trials <= 2 * many * math.log2(count / many) + 4 * many + 2


@pytest.mark.parametrize(("begin", "length"), [(0, 8), (100, 8), (251, 3), (244, 12), (492, 8)])
def test_a_spot_of_neighbours_takes_two_trials_for_each_and_few_to_get_there(begin: int, length: int) -> None:
    nodes = name_nodes(500)
    found = find(nodes, Gate(needs(nodes[begin : begin + length])))
    assert found.kept == nodes[begin : begin + length]
    assert found.trials <= 2 * length + 4 * math.log2(500 / length) + 6


def test_errors_that_accumulate_are_met_well_before_the_search_is_over() -> None:
    nodes = name_nodes(500)
    # Three fifths must stay, no matter which; to prove that none can be given up takes hundreds of trials.
    found = find(nodes, Gate(lambda kept: len(kept) >= 300), max_trials=40)
    assert found.kept is not None
    assert len(found.kept) <= 320


@given(monotone())
def test_more_trials_never_keep_more(case: tuple[tuple[str, ...], Holds]) -> None:
    nodes, holds = case
    sizes = []
    for max_trials in range(12):
        kept = find(nodes, Gate(holds), max_trials=max_trials).kept
        sizes.append(math.inf if kept is None else len(kept))
    assert sizes == sorted(sizes, reverse=True)


def test_a_search_ends_when_its_time_is_up() -> None:
    nodes, asked = name_nodes(100), Gate(needs(name_nodes(3)))
    found = search(nodes, asked, max_trials=1000, deadline=lambda: len(asked.asked) >= 5, say=lambda _: None)
    assert found.trials == 5
    assert found.kept is not None
    assert search(nodes, asked, max_trials=1000, deadline=lambda: True, say=lambda _: None) == SearchResult(
        None, 0
    )


def test_every_trial_is_told() -> None:
    said: list[str] = []
    search(name_nodes(2), needs(name_nodes(1)), max_trials=99, deadline=never, say=said.append)
    assert said == [
        "trial 1: keeping 0 of 2 nodes does not pass the gate",
        "trial 2: keeping 2 of 2 nodes passes the gate",
        "trial 3: keeping 1 of 2 nodes does not pass the gate",
        "trial 4: keeping 1 of 2 nodes passes the gate",
    ]


class Killed(BaseException):
    pass


def test_a_search_cut_off_at_any_trial_goes_on_to_the_same_result_and_repeats_no_trial(
    tmp_path: Path,
) -> None:
    nodes = name_nodes(30)
    gate = Gate(needs((nodes[3], nodes[4], nodes[20])))
    whole = find(nodes, gate)
    for cut in range(whole.trials + 1):
        path = tmp_path / f"{cut}.jsonl"
        tried = Gate(gate.holds)

        def attempt(kept: Kept, *, tried: Gate = tried, cut: int = cut) -> bool:
            if len(tried.asked) == cut:
                raise Killed
            return tried(kept)

        if cut < whole.trials:
            with pytest.raises(Killed):
                find(nodes, partial(TrialsJournal(path).holds, attempt=attempt))
        resumed = find(nodes, partial(TrialsJournal(path).holds, attempt=tried))
        assert resumed == whole
        assert tried.asked == gate.asked


def recorded(path: Path, kept: Kept) -> bool | None:
    """Returns a journal's outcome; None if the trial has to be made."""

    def attempt(kept: Kept) -> bool:
        raise Killed

    try:
        return TrialsJournal(path).holds(kept, attempt)
    except Killed:
        return None


def test_outcomes_come_back_whatever_the_order_of_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    TrialsJournal(path).holds(frozenset(reversed(NAMES)), lambda _: False)
    assert recorded(path, KEPT) is False
    assert recorded(path, frozenset({"ü"})) is None


def test_a_journal_cut_off_anywhere_in_its_last_line_loses_that_trial_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    TrialsJournal(path).holds(frozenset(), lambda _: False)
    first = path.stat().st_size
    TrialsJournal(path).holds(KEPT, lambda _: True)
    whole = path.read_bytes()
    for end in range(first, len(whole) - 1, 9):
        path.write_bytes(whole[:end])
        assert (recorded(path, frozenset()), recorded(path, KEPT)) == (False, None)
        TrialsJournal(path).holds(KEPT, lambda _: True)
        assert (recorded(path, frozenset()), recorded(path, KEPT)) == (False, True)


@pytest.mark.parametrize("damage", [b"\0" * 50, b"42", b"{}", b'{"nodes": 1}', b"\xff", b"["])
def test_a_line_that_cannot_be_read_is_a_trial_to_make_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal"
    TrialsJournal(path).holds(KEPT, lambda _: True)
    path.write_bytes(damage + b"\n" + path.read_bytes() + damage + b"\n")
    assert recorded(path, KEPT) is True
    assert json.loads(path.read_bytes().splitlines()[2])["count"] == len(KEPT)
