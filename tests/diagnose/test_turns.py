"""How many rounds a comparison has, by a clock that only what is measured moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.diagnose.turns import MOST_S, Turns, explain_cut, is_affordable, take_turns
from pipeline.errors import LoadError
from pipeline.measuring.comparison import LEAST_ROUNDS

NAMES = ("a", "b", "c")


def took(
    seconds: Callable[[str], float], *, estimate_s: float, most: int = 7, enough_s: float = 7.0
) -> tuple[Turns[str, str], float]:
    """Returns what turns came to, and how long all of them took."""
    now_s = [100.0]

    def measure(name: str) -> str:
        now_s[0] += seconds(name)
        return name.upper()

    turns = take_turns(
        NAMES, measure, estimate_s=estimate_s, most=most, enough_s=enough_s, clock=lambda: now_s[0]
    )
    return turns, now_s[0] - 100


def test_what_is_quick_is_measured_often() -> None:
    turns, _ = took(lambda name: 0.01, estimate_s=1)
    assert turns.rounds == {name: (name.upper(),) * 7 for name in NAMES}
    assert turns.round_s == pytest.approx(0.03)


def test_what_takes_a_while_is_measured_as_often_as_shows_a_spread() -> None:
    turns, _ = took(lambda name: 10.0, estimate_s=60)
    assert {len(of_each) for of_each in turns.rounds.values()} == {LEAST_ROUNDS}


def test_what_takes_hours_is_not_begun() -> None:
    turns, took_s = took(lambda name: 3600.0, estimate_s=3 * 3600.0)
    assert (turns.rounds, turns.failures, took_s) == ({}, {}, 0)
    assert turns.round_s == 3 * 3600.0


def test_what_takes_longer_than_was_thought_is_not_gone_on_with() -> None:
    turns, _ = took(lambda name: 600.0, estimate_s=60)
    assert {len(of_each) for of_each in turns.rounds.values()} == {1}


def test_what_takes_less_than_was_feared_is_gone_on_with() -> None:
    turns, _ = took(lambda name: 60.0, estimate_s=MOST_S)
    assert {len(of_each) for of_each in turns.rounds.values()} == {LEAST_ROUNDS}


def test_one_that_fails_is_not_tried_again_and_none_of_it_counts() -> None:
    tried: list[str] = []

    def measure(name: str) -> int:
        tried.append(name)
        if name == "b" and tried.count("b") == 2:
            raise LoadError("out of memory")
        return 1

    turns = take_turns(NAMES, measure, estimate_s=1)
    assert turns.rounds == {"a": (1, 1, 1), "c": (1, 1, 1)}
    assert turns.failures == {"b": "out of memory"}
    assert tried.count("b") == 2


@given(st.integers(0, 6), st.floats(0, 1e5), st.floats(0, 1e5))
def test_the_longer_a_round_the_sooner_it_ends(done: int, one_s: float, other_s: float) -> None:
    short_s, long_s = sorted((one_s, other_s))
    assert is_affordable(done, short_s, enough_s=7) or not is_affordable(done, long_s, enough_s=7)


@given(st.floats(0, 1e5), st.floats(0, 1))
def test_no_comparison_takes_much_longer_than_its_limit(estimate_s: float, share: float) -> None:
    """Where the estimate is no less than what a round takes, as it is made to be."""
    _, took_s = took(lambda name: estimate_s * share / len(NAMES), estimate_s=estimate_s)
    assert took_s <= MOST_S * 1.001


def test_what_was_cut_is_said_with_its_figures() -> None:
    assert "up to 240 minutes" in explain_cut(0, 4 * 3600).text
    assert "there was 1 in place of 3" in explain_cut(1, 1800).text
