"""What a ticking thread sees of calls that are known to hold the interpreter, and of such as are not."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.diagnose.gil.ticking import Call, Ticker, call_between
from pipeline.diagnose.gil.verdict import Verdict, judge
from pipeline.diagnose.gil.watching import hold_core_only, hold_interpreter

WORK_US = 50_000
ATTEMPTS = 10

times = st.floats(0, 100)


@given(st.tuples(times, times).map(sorted), st.lists(times).map(sorted))
def test_a_gap_is_never_longer_than_the_call_and_never_shorter_than_an_even_share(
    ends: list[float], ticks: list[float]
) -> None:
    call = call_between(ends[0], ends[1], ticks)
    assert call.longest_gap_ms <= call.elapsed_ms
    assert call.longest_gap_ms * (call.ticks + 1) >= call.elapsed_ms * (1 - 1e-9)


@given(st.tuples(times, times).map(sorted), st.lists(times).map(sorted))
def test_ticks_outside_a_call_say_nothing_of_it(ends: list[float], ticks: list[float]) -> None:
    started, ended = ends
    inside = [tick for tick in ticks if started < tick < ended]
    assert call_between(started, ended, ticks) == call_between(started, ended, inside)


def test_without_a_tick_the_gap_is_the_call() -> None:
    assert call_between(1.0, 1.5, [0.9, 1.6]) == Call(500.0, 500.0, 0)


def clear_verdict(work: Callable[[], object]) -> Verdict:
    """Watches until the machine is quiet enough for a verdict, which is then the only one there can be."""
    for _ in range(ATTEMPTS):
        with Ticker() as ticker:
            released, held, calls = (
                [ticker.observe(each)[0] for _ in range(3)]
                for each in (hold_core_only, hold_interpreter, work)
            )
        verdict = judge(calls, released=released, held=held)
        if verdict in ("held", "released"):
            return verdict
    pytest.skip("the machine is too busy for any verdict")


def test_a_call_into_c_that_keeps_the_interpreter_is_found_out() -> None:
    library = ctypes.PyDLL(None)
    assert clear_verdict(lambda: library.usleep(WORK_US)) == "held"


@pytest.mark.parametrize(
    "work",
    [lambda: ctypes.CDLL(None).usleep(WORK_US), lambda: time.sleep(WORK_US / 1e6)],
    ids=["c", "python"],
)
def test_a_call_that_lets_go_of_it_is_not_accused(work: Callable[[], object]) -> None:
    assert clear_verdict(work) == "released"


def test_what_the_work_returned_is_returned_and_the_thread_ends() -> None:
    with Ticker() as ticker:
        assert ticker.observe(lambda: 7)[1] == 7
    assert not ticker._thread.is_alive()
