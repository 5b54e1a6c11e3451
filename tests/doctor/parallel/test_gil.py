"""What a ticking thread sees of calls that hold the interpreter, and of such as do not; and who is accused.

What ONNX Runtime does in each version is in tests/compat/test_gil_by_version.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.parallel.gil import (
    LAYERS,
    MIN_CALL_MS,
    RELEASED_SHARE,
    WEIGHTS_BYTES,
    Call,
    Heartbeat,
    Verdict,
    call_between,
    hold_core_only,
    judge,
    write_heavy_model,
)

WORK_US = 50_000
ATTEMPTS = 20

times = st.floats(0, 100)


@given(st.tuples(times, times).map(sorted), st.lists(times).map(sorted))
def test_a_gap_is_never_longer_than_the_call_and_never_shorter_than_an_even_share(ends, ticks):
    call = call_between(ends[0], ends[1], ticks)
    assert call.longest_gap_ms <= call.elapsed_ms
    assert call.longest_gap_ms * (call.ticks + 1) >= call.elapsed_ms * (1 - 1e-9)


@given(st.tuples(times, times).map(sorted), st.lists(times).map(sorted))
def test_ticks_outside_a_call_say_nothing_of_it(ends, ticks):
    started, ended = ends
    inside = [tick for tick in ticks if started < tick < ended]
    assert call_between(started, ended, ticks) == call_between(started, ended, inside)


def test_without_a_tick_the_gap_is_the_call():
    assert call_between(1.0, 1.5, [0.9, 1.6]) == Call(500.0, 500.0, 0)


def is_quiet(released: list[Call]) -> bool:
    """Says whether a machine lets what is known beforehand come out: written anew, to judge the judge."""
    gap_ms = max(call.longest_gap_ms for call in released)
    return gap_ms <= RELEASED_SHARE * min(WORK_US / 1e3, *(call.elapsed_ms for call in released))


def check_verdict(work: Callable[[], object], expected: Verdict) -> None:
    """Watches until the verdict is as expected; skips where the machine was never quiet enough for one.

    What the machine is busy with may look like either once, but not every time.
    """
    others: list[Verdict] = []
    for _ in range(ATTEMPTS):
        with Heartbeat() as heartbeat:
            released, calls = ([heartbeat.observe(each) for _ in range(3)] for each in (hold_core_only, work))
        verdict = judge(calls, released=released)
        if verdict == expected:
            return
        if is_quiet(released):
            others.append(verdict)
    if not others:
        pytest.skip("the machine is too busy for any verdict")
    pytest.fail(f"expected {expected}, got {others}")


def test_where_the_interpreter_is_kept_the_gap_is_the_call_however_busy_the_machine():
    with Heartbeat() as heartbeat:
        call = heartbeat.observe(lambda: ctypes.PyDLL(None).usleep(WORK_US))
    assert call.longest_gap_ms >= WORK_US / 1e3
    assert call.elapsed_ms >= call.longest_gap_ms


def test_where_it_is_not_there_are_ticks_however_busy_the_machine():
    with Heartbeat() as heartbeat:
        for pause_s in (0.01, 0.1, 1.0, 10.0, 100.0):
            call = heartbeat.observe(lambda: time.sleep(pause_s))  # noqa: B023
            if call.ticks >= 4:
                break
    assert call.ticks >= 4


def test_a_call_into_c_that_keeps_the_interpreter_is_found_out():
    library = ctypes.PyDLL(None)
    check_verdict(lambda: library.usleep(WORK_US), "held")


@pytest.mark.parametrize(
    "work",
    [lambda: ctypes.CDLL(None).usleep(WORK_US), lambda: time.sleep(WORK_US / 1e6)],
    ids=["c", "python"],
)
def test_a_call_that_lets_go_of_it_is_not_accused(work):
    check_verdict(work, "released")


def test_the_thread_ends_with_the_block():
    with Heartbeat():
        pass
    assert "ortprep-heartbeat" not in {thread.name for thread in threading.enumerate()}


FREE = (Call(60, 0.7, 100),) * 3
STUCK = (Call(60, 60, 0),) * 3
LONG_FREE = (Call(400, 7, 600),) * 3
LONG_STUCK = (Call(400, 400, 0),) * 3
LONG_PARTLY = (Call(400, 130, 400),) * 3


def test_a_gap_as_long_as_the_call_is_the_lock_and_ticks_throughout_are_none():
    assert judge(LONG_STUCK, released=FREE) == "held"
    assert judge(LONG_FREE, released=FREE) == "released"
    assert judge(LONG_PARTLY, released=FREE) == "unclear"


def test_one_call_that_ticks_throughout_acquits_the_others():
    """A busy machine makes gaps; nothing makes ticks where the interpreter is held."""
    assert judge((LONG_FREE[0], *LONG_STUCK), released=FREE) == "released"
    assert judge(LONG_STUCK, released=(FREE[0], *STUCK)) == "held"


@given(st.permutations([*LONG_FREE[:1], *LONG_STUCK, Call(400, 130, 300)]))
def test_the_order_of_calls_is_of_no_account(calls):
    assert judge(calls, released=FREE) == "released"


def test_a_lock_held_in_many_pieces_is_held():
    pieces = (Call(400, 20, 20),) * 3
    assert judge(pieces, released=FREE) == "held"


@given(st.floats(0.001, MIN_CALL_MS * 0.999), st.floats(0, 1), st.integers(0, 1000))
def test_short_calls_say_nothing(elapsed_ms, share, ticks):
    calls = (Call(elapsed_ms, elapsed_ms * share, ticks),) * 3
    assert judge(calls, released=FREE) == "unclear"


def test_the_noisier_the_machine_the_longer_a_call_must_be():
    calls = (Call(15, 15, 0),) * 3
    assert judge(calls, released=FREE) == "held"
    assert judge(calls, released=(Call(60, 6, 90),) * 3) == "unclear"


@given(st.floats(20, 1e4), st.floats(0.001, 1), st.integers(0, 1000))
def test_no_verdict_where_the_known_calls_do_not_come_out(elapsed_ms, share, ticks):
    calls = (Call(elapsed_ms, elapsed_ms * share, ticks),)
    assert judge(calls, released=STUCK) == "unclear"


@given(st.floats(20, 1e4), st.floats(0.001, 1), st.floats(0.001, 1))
def test_a_longer_gap_never_speaks_against_the_lock(elapsed_ms, one, other):
    severity = ("released", "unclear", "held")
    low, high = sorted((one, other))
    verdicts = [
        judge([Call(elapsed_ms, elapsed_ms * share, int(elapsed_ms))], released=FREE) for share in (low, high)
    ]
    assert severity.index(verdicts[0]) <= severity.index(verdicts[1])


def test_the_model_that_is_made_is_valid(tmp_path):
    model, sample = write_heavy_model(tmp_path)
    onnx.checker.check_model(str(model), full_check=False)
    assert len(onnx.load(str(model)).graph.initializer) == LAYERS
    assert model.stat().st_size > WEIGHTS_BYTES
    assert list(np.load(sample)) == ["x0"]
