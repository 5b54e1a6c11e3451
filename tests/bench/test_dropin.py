from __future__ import annotations

from typing import Any

import pytest

from bench.dropin import PLAIN, RUN, VARIABLES, agrees, report


def runs(*, first_ms: float = 900.0, answer: Any = "total") -> list[dict[str, Any]]:
    """Three processes on a machine that changes its speed."""
    return [
        {"first_ms": first_ms * speed, "whole_ms": 1200 * speed, "call_ms": 80 * speed, "answer": answer}
        for speed in (1.0, 1.4, 0.9)
    ]


@pytest.mark.parametrize(
    ("first_ms", "verdict"), [(500.0, "better"), (900.0, "no difference"), (1500.0, "worse")]
)
def test_a_way_is_better_or_worse_beyond_the_noise_only(first_ms: float, verdict: str) -> None:
    found = report({PLAIN: runs(), RUN: runs(first_ms=first_ms), VARIABLES: runs()})
    assert found["figures"]["first_ms"][RUN]["verdict"] == verdict
    assert found["figures"]["first_ms"][RUN]["to_plain"] == pytest.approx(first_ms / 900)
    assert found["figures"]["whole_ms"][VARIABLES]["verdict"] == "no difference"


def test_one_answer_that_differs_is_told() -> None:
    assert report({PLAIN: runs(), RUN: runs(), VARIABLES: runs()})["answers_agree"]
    assert not report({PLAIN: runs(), RUN: runs(answer="tota1"), VARIABLES: runs()})["answers_agree"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, "a", {"x": 0.5}], [1, "a", {"x": 0.50001}], True),
        ([0.5], [0.6], False),
        ([1], [2], False),
        ([1, 2], [1], False),
        ({"x": 1}, {"y": 1}, False),
    ],
)
def test_numbers_agree_within_rounding_and_all_else_exactly(one: Any, other: Any, expected: bool) -> None:
    assert agrees(one, other) is expected
