"""Who held the interpreter, from made-up figures."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.gil.heartbeat import Call, GilObservations
from ortprep.doctor.gil.verdict import (
    MIN_CALL_MS,
    find_in,
    judge,
    releases_in_creation,
    tabulate,
)
from tests.doctor.builders import RuleCase, codes, name_case, written_codes

FREE = (Call(60, 0.7, 100),) * 3
STUCK = (Call(60, 60, 0),) * 3
LONG_FREE = (Call(400, 7, 600),) * 3
LONG_STUCK = (Call(400, 400, 0),) * 3
LONG_PARTLY = (Call(400, 130, 400),) * 3
SHORT = (Call(3, 3, 0),) * 3


def observed(**phases: tuple[Call, ...]) -> GilObservations:
    return GilObservations("1.30.0", phases, released=FREE)


CASES = (
    RuleCase("gil-held-in-creation", "advice", find_in(observed(load=LONG_STUCK))),
    RuleCase("gil-held-in-creation", "advice", find_in(observed(load=LONG_FREE, initialise=LONG_STUCK))),
    RuleCase("gil-released-in-creation", "ok", find_in(observed(load=LONG_FREE, initialise=LONG_FREE))),
    RuleCase("gil-released-in-run", "ok", find_in(observed(run=LONG_FREE))),
    RuleCase("gil-held-in-run", "problem", find_in(observed(run=LONG_STUCK))),
    RuleCase("gil-unclear", "note", find_in(observed(load=SHORT))),
    RuleCase("gil-unclear", "note", find_in(observed(load=LONG_PARTLY))),
)


def test_every_code_has_a_case() -> None:
    written = written_codes("ortprep.doctor.gil.verdict", "ortprep.doctor.gil.check")
    assert written == {case.code for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_every_case_is_found_with_its_severity(case: RuleCase) -> None:
    assert case.is_found


def test_a_gap_as_long_as_the_call_is_the_lock() -> None:
    assert judge(LONG_STUCK, released=FREE) == "held"


def test_ticks_throughout_are_no_lock() -> None:
    assert judge(LONG_FREE, released=FREE) == "released"


def test_one_call_that_ticks_throughout_acquits_the_others() -> None:
    """A busy machine makes gaps; nothing makes ticks where the interpreter is held."""
    assert judge((LONG_FREE[0], *LONG_STUCK), released=FREE) == "released"
    assert judge(LONG_STUCK, released=(FREE[0], *STUCK)) == "held"


@given(st.permutations([*LONG_FREE[:1], *LONG_STUCK, Call(400, 130, 300)]))
def test_the_order_of_calls_is_of_no_account(calls: list[Call]) -> None:
    assert judge(calls, released=FREE) == "released"


def test_a_lock_held_in_many_pieces_is_held() -> None:
    pieces = (Call(400, 20, 20),) * 3
    assert judge(pieces, released=FREE) == "held"


@given(st.floats(0.001, MIN_CALL_MS * 0.999), st.floats(0, 1), st.integers(0, 1000))
def test_short_calls_say_nothing(elapsed_ms: float, share: float, ticks: int) -> None:
    calls = (Call(elapsed_ms, elapsed_ms * share, ticks),) * 3
    assert judge(calls, released=FREE) == "unclear"


def test_the_noisier_the_machine_the_longer_a_call_must_be() -> None:
    calls = (Call(15, 15, 0),) * 3
    assert judge(calls, released=FREE) == "held"
    assert judge(calls, released=(Call(60, 6, 90),) * 3) == "unclear"


@given(st.floats(20, 1e4), st.floats(0.001, 1), st.integers(0, 1000))
def test_no_verdict_where_the_known_calls_do_not_come_out(
    elapsed_ms: float, share: float, ticks: int
) -> None:
    calls = (Call(elapsed_ms, elapsed_ms * share, ticks),)
    assert judge(calls, released=STUCK) == "unclear"


@given(st.floats(20, 1e4), st.floats(0.001, 1), st.floats(0.001, 1))
def test_a_longer_gap_never_speaks_against_the_lock(elapsed_ms: float, one: float, other: float) -> None:
    severity = ("released", "unclear", "held")
    low, high = sorted((one, other))
    verdicts = [
        judge([Call(elapsed_ms, elapsed_ms * share, int(elapsed_ms))], released=FREE) for share in (low, high)
    ]
    assert severity.index(verdicts[0]) <= severity.index(verdicts[1])


def test_a_version_that_holds_it_in_creation_is_advised_against_with_the_figures() -> None:
    found = find_in(observed(load=LONG_STUCK, initialise=LONG_STUCK, run=LONG_FREE))
    assert codes(found) == ["gil-held-in-creation", "gil-released-in-run"]
    assert "400.0 of 400.0 ms of load, 400.0 of 400.0 ms of initialise" in found[0].text
    assert "install ONNX Runtime 1.31 or later" in (found[0].hint or "")


def test_the_interpreter_is_let_go_of_from_1_31_on() -> None:
    versions = ("1.9.0", "1.30.2", "1.31.0", "1.31.0.dev20261101", "2.0", "of my own")
    assert [releases_in_creation(version) for version in versions] == [False, False, True, True, True, True]


@pytest.mark.parametrize("phase", ["load", "initialise"])
def test_one_half_of_creation_that_holds_it_is_enough(phase: str) -> None:
    seen = observed(**({"load": LONG_FREE, "initialise": LONG_FREE} | {phase: LONG_STUCK}))
    (finding,) = find_in(seen)
    assert finding.code == "gil-held-in-creation"
    assert f"of {phase}" in finding.text


def test_a_version_that_releases_it_is_good() -> None:
    found = find_in(observed(create=LONG_FREE, run=LONG_FREE))
    assert [finding.severity for finding in found] == ["ok", "ok"]


def test_holding_it_in_runs_is_a_problem() -> None:
    (finding,) = find_in(observed(run=LONG_STUCK))
    assert (finding.code, finding.severity) == ("gil-held-in-run", "problem")


def test_what_is_too_short_is_said_to_be_unclear_and_nothing_else() -> None:
    (finding,) = find_in(observed(load=SHORT, run=SHORT))
    assert (finding.code, finding.severity) == ("gil-unclear", "note")
    assert "of load, 3.0 of 3.0 ms of run" in finding.text


def test_a_busy_machine_is_said_to_be_one() -> None:
    seen = dataclasses.replace(observed(load=LONG_STUCK), released=STUCK)
    (finding,) = find_in(seen)
    assert finding.code == "gil-unclear"
    assert "100%" in finding.text


def test_a_table_has_every_phase_and_what_was_known_beforehand() -> None:
    table = tabulate(observed(load=LONG_STUCK, run=LONG_FREE))
    assert [row[0] for row in table.rows] == ["load", "run", "known to release it"]
    assert all(len(row) == len(table.columns) for row in table.rows)
