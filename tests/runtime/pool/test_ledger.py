from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import PoolError
from ortprep.runtime.pool.ledger import Ledger, RepeatedAnswerError, Request, depth_for

_STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "answer", "lose", "open", "withdraw", "expire"]), st.integers(0, 9)),
    max_size=120,
)


@given(_STEPS, st.integers(0, 2))
def test_every_request_ends_exactly_once(steps: list[tuple[str, int]], retries: int) -> None:
    ledger, ends, admitted, now = Ledger(), Counter[int](), 0, 0.0
    models = {0: "a", 1: "b", 2: "ab"}
    abandoned: set[int] = set()
    for worker, names in models.items():
        ledger.add_worker(worker, frozenset(names))
        ledger.open_worker(worker)
    for step, pick in steps:
        now += 1.0
        worker = pick % 3
        sent = ledger.queue_of(worker).sent
        if step == "admit":
            admitted += 1
            deadline = now + 5 if pick > 6 else math.inf
            ledger.admit(Request(admitted, "ab"[pick % 2], deadline, retries))
        elif step == "answer" and sent:
            request = ledger.answer(worker, sent[0], now, service_s=0.01)
            ends[request.number] += request.number not in abandoned
        elif step == "lose":
            before = list(sent)
            lost = {request.number for request in ledger.lose(worker, blames_oldest=pick < 5)}
            failed = lost - abandoned
            assert abandoned & set(before) <= lost <= set(before)
            assert failed == set() or (pick < 5 and failed == {before[0]})
            ends.update(failed)
        elif step == "open":
            ledger.open_worker(worker)
        elif step == "withdraw":
            withdrawn = ledger.withdraw(pick)
            if withdrawn is not None:
                assert withdrawn.worker is None
                ends[withdrawn.number] += 1
        elif step == "expire":
            for request in ledger.expire(now):
                assert request.deadline <= now
                abandoned.add(request.number)
                ends[request.number] += 1
        for request, got in ledger.assign(now):
            assert request.model in models[got]
            assert ledger.queue_of(got).is_open
        assert all(count <= 1 for count in ends.values())
    for worker in models:
        ledger.open_worker(worker)
    while len(ledger):
        list(ledger.assign(now))
        for worker in models:
            for number in list(ledger.queue_of(worker).sent):
                ledger.answer(worker, number, now)
                ends[number] += number not in abandoned
    assert ends == Counter(range(1, admitted + 1))


def make(workers: int = 1) -> Ledger:
    ledger = Ledger()
    for worker in range(workers):
        ledger.add_worker(worker, frozenset("m"))
        ledger.open_worker(worker)
    return ledger


def admit(ledger: Ledger, *numbers: int, retries: int = 0) -> list[tuple[int, int]]:
    for number in numbers:
        ledger.admit(Request(number, "m", retries=retries))
    return [(request.number, worker) for request, worker in ledger.assign(0.0)]


def test_requests_go_to_the_worker_with_the_fewest() -> None:
    assert admit(make(3), 1, 2, 3, 4) == [(1, 0), (2, 1), (3, 2), (4, 0)]


def test_a_worker_has_no_more_than_its_depth() -> None:
    ledger = make()
    assert [number for number, _ in admit(ledger, 1, 2, 3)] == [1, 2]
    ledger.answer(0, 1, 1.0, service_s=1e-5)
    assert [request.number for request, _ in ledger.assign(1.0)] == [3]
    assert depth_for(1e-5) == 16
    assert depth_for(0.0005) == 4
    assert depth_for(10.0) == depth_for(None) == 2


def test_only_the_oldest_is_blamed_and_the_others_keep_their_turn() -> None:
    ledger = make()
    admit(ledger, 1, 2, 3)
    assert [request.number for request in ledger.lose(0)] == [1]
    ledger.open_worker(0)
    assert [request.number for request, _ in ledger.assign(1.0)] == [2, 3]


def test_who_did_not_die_of_it_keeps_it() -> None:
    ledger = make()
    admit(ledger, 1, 2)
    assert ledger.lose(0, blames_oldest=False) == []
    ledger.open_worker(0)
    assert [request.number for request, _ in ledger.assign(1.0)] == [1, 2]


def test_no_model_waits_for_the_backlog_of_another() -> None:
    ledger = Ledger()
    ledger.add_worker(0, frozenset("ab"))
    ledger.open_worker(0)
    for number in range(1, 10):
        ledger.admit(Request(number, "a"))
    ledger.admit(Request(10, "b"))
    for number in range(11, 20):
        ledger.admit(Request(number, "a"))
    order = [request.number for request, _ in ledger.assign(0.0)]
    while ledger.queue_of(0).sent:
        ledger.answer(0, ledger.queue_of(0).sent[0], 1.0)
        order += [request.number for request, _ in ledger.assign(1.0)]
    assert order == list(range(1, 20))


def test_a_retry_is_used_up() -> None:
    ledger = make()
    admit(ledger, 1, retries=1)
    assert ledger.lose(0) == []
    ledger.open_worker(0)
    assert [request.number for request, _ in ledger.assign(1.0)] == [1]
    assert [request.number for request in ledger.lose(0)] == [1]


def test_an_answer_out_of_turn_is_an_error() -> None:
    ledger = make()
    admit(ledger, 1, 2)
    with pytest.raises(PoolError, match="expected one to request 1, got one to 2"):
        ledger.answer(0, 2, 1.0)


def test_an_answer_that_is_repeated_is_known_as_such_taken_or_not() -> None:
    ledger = make()
    for number in (1, 2, 3):
        ledger.admit(Request(number, "m"))
    list(ledger.assign(0.0))
    with pytest.raises(RepeatedAnswerError):
        ledger.expect(0, 1, position=1)
    ledger.answer(0, 1, 1.0)
    list(ledger.assign(1.0))
    with pytest.raises(RepeatedAnswerError, match="expected one to request 2, got one to 1"):
        ledger.expect(0, 1)
    with pytest.raises(PoolError) as caught:
        ledger.expect(0, 3)
    assert not isinstance(caught.value, RepeatedAnswerError)


def test_the_time_of_a_run_begins_when_its_turn_comes() -> None:
    ledger = make()
    admit(ledger, 1, 2)
    assert ledger.queue_of(0).since == 0.0
    ledger.answer(0, 1, 9.0)
    assert ledger.queue_of(0).since == 9.0
    ledger.close_worker(0)
    assert ledger.queue_of(0).since == math.inf


def test_what_nobody_waits_for_is_dropped_with_its_worker() -> None:
    ledger = make()
    ledger.admit(Request(1, "m", deadline=5.0))
    list(ledger.assign(0.0))
    assert [request.number for request in ledger.expire(5.0)] == [1]
    assert ledger.next_deadline() == math.inf
    assert [request.is_abandoned for request in ledger.lose(0)] == [True]
    assert len(ledger) == 0
