"""Which way is soonest, from made-up figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.parallel.check import combine_times, count_lanes, count_sessions
from ortprep.doctor.parallel.session_creation import CreationTimes
from ortprep.doctor.parallel.verdict import (
    MIN_GAIN,
    WAYS,
    CreationResult,
    ParallelRun,
    Way,
    efficiency,
    find_in,
    find_soonest,
    speed_up,
    tabulate,
)
from ortprep.measuring.comparison import is_below
from ortprep.measuring.rounds import InterleavedRuns
from tests.doctor.builders import RuleCase, codes, name_case, written_codes

positive = st.floats(0.1, 1e5)
rounds = st.lists(st.tuples(positive, positive, positive), min_size=3, max_size=7)
START_MS = 200.0


def made(creating_ms: float, *, start_ms: float = START_MS, sessions: int = 2) -> CreationResult:
    return CreationResult(
        start_ms + creating_ms, start_ms, creating_ms, (creating_ms / sessions,) * sessions, 100.0
    )


def ran(
    creating: Mapping[Way, Sequence[float]],
    *,
    start_ms: Mapping[Way, float] | None = None,
    failures: Mapping[Way, str] | None = None,
    lanes: int = 2,
    version: str = "1.31.1",
    devices: tuple[str, ...] = ("cpu",),
) -> ParallelRun:
    starts: Mapping[Way, float] = start_ms or {}
    figures = {
        way: tuple(made(figure, start_ms=starts.get(way, START_MS)) for figure in of_way)
        for way, of_way in creating.items()
    }
    ways = InterleavedRuns(figures, failures or {}, 1.0)
    return ParallelRun(2, devices, lanes, version, ways)


def around(middle: float) -> tuple[float, float, float]:
    return middle * 0.99, middle, middle * 1.01


APART = ("cuda:0", "cuda:1")


def findings_of(
    sequential_ms: float,
    threads_ms: float,
    processes_ms: float,
    *,
    devices: tuple[str, ...] = ("cpu",),
    version: str = "1.31.1",
    start_ms: Mapping[Way, float] | None = None,
) -> tuple[Finding, ...]:
    figures = zip(WAYS, map(around, (sequential_ms, threads_ms, processes_ms)), strict=True)
    return find_in(ran(dict(figures), devices=devices, version=version, start_ms=start_ms))


CASES = (
    RuleCase("way-failed", "problem", find_in(ran({}, failures={"processes": "out of memory"}))),
    RuleCase("way-failed", "problem", find_in(ran({}, failures={"threads": "no"}, devices=APART))),
    RuleCase("way-failed", "note", find_in(ran({}, failures={"threads": "SIGSEGV"}))),
    RuleCase("rounds-cut", "note", find_in(ran({}))),
    RuleCase("processes-soonest", "advice", findings_of(4000, 4000, 2000)),
    RuleCase("threads-soonest", "advice", findings_of(4000, 2000, 4000, devices=APART)),
    RuleCase("threads-soonest", "note", findings_of(4000, 2000, 4000)),
    RuleCase("sequential-as-soon", "note", findings_of(4000, 4000, 4000)),
    RuleCase("threads-gain", "ok", findings_of(4000, 2000, 4000)),
    RuleCase("threads-take-turns", "advice", findings_of(4000, 4000, 4000, version="1.30.0")),
    RuleCase("threads-gain-nothing", "note", findings_of(4000, 4000, 4000)),
)


def test_every_code_has_a_case() -> None:
    modules = ("parallel.verdict", "parallel.check", "interleaved_runs")
    assert written_codes(*(f"ortprep.doctor.{module}" for module in modules)) == {p.code for p in CASES}


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_every_case_is_found_with_its_severity(case: RuleCase) -> None:
    assert case.is_found


@pytest.mark.parametrize("done", range(3))
def test_too_few_rounds_are_said_to_be_and_compare_nothing(done: int) -> None:
    figures = {way: around(1000 / (1 + index))[:done] for index, way in enumerate(WAYS)}
    assert set(codes(find_in(ran({} if not done else figures)))) == {"rounds-cut"}


def test_threads_that_fail_on_one_device_are_told_that_nobody_promised_them() -> None:
    (finding,) = find_in(ran({}, failures={"threads": "SIGSEGV"}))
    assert "#27089" in finding.text


def test_processes_that_gain_beyond_the_noise_are_advised_with_a_command() -> None:
    found = find_in(ran({"sequential": around(4000), "threads": around(4000), "processes": around(2000)}))
    (finding,) = [finding for finding in found if finding.code == "processes-soonest"]
    assert finding.severity == "advice"
    assert "workers_per_device=2" in (finding.hint or "")
    assert "4200 ms one after another" in finding.text


def test_on_gpus_the_advice_names_all_devices() -> None:
    found = find_in(
        ran({"sequential": around(4000), "processes": around(2000)}, devices=("cuda:0", "cuda:1"))
    )
    assert found[0].hint == 'SessionPool("artifacts/NAME")'


def test_of_one_gpu_the_advice_is_several_workers_on_it() -> None:
    found = find_in(ran({"sequential": around(4000), "processes": around(2000)}, devices=("cuda:1",)))
    assert 'devices=["cuda:1"], workers_per_device=2' in (found[0].hint or "")


def test_threads_that_gain_as_much_as_processes_are_simpler() -> None:
    found = find_in(ran({"sequential": around(4000), "threads": around(2000), "processes": around(2010)}))
    assert codes(found)[0] == "threads-soonest"


def test_threads_are_advised_only_where_each_has_a_device_of_its_own() -> None:
    """Sessions on one device are not promised to be safe to make at once (microsoft/onnxruntime #27089)."""
    figures: dict[Way, Sequence[float]] = {"sequential": around(4000), "threads": around(2000)}
    apart, together = (
        find_in(ran(figures, devices=devices))[0] for devices in (("cuda:0", "cuda:1"), ("cuda:0",))
    )
    assert (apart.code, apart.severity) == ("threads-soonest", "advice")
    assert (together.code, together.severity) == ("threads-soonest", "note")
    assert "#27089" in together.text


def test_where_nothing_gains_one_after_another_will_do() -> None:
    found = find_in(ran({way: around(1000) for way in WAYS}))
    assert codes(found)[0] == "sequential-as-soon"
    assert found[0].severity == "note"


def test_threads_that_take_turns_are_explained_by_an_old_version() -> None:
    slow: dict[Way, Sequence[float]] = {"sequential": around(400), "threads": around(410)}
    assert "threads-take-turns" in codes(find_in(ran(slow, version="1.30.2")))
    assert "threads-gain-nothing" in codes(find_in(ran(slow, version="1.31.0")))


def test_one_lane_has_nothing_to_gain_by_threads() -> None:
    found = find_in(ran({"sequential": around(400), "threads": around(410)}, lanes=1))
    assert not any(code.startswith("threads-") for code in codes(found))


@pytest.mark.parametrize("failed", WAYS)
def test_a_way_that_fails_is_a_problem_and_the_others_are_compared(failed: Way) -> None:
    others = {way: around(1000) for way in WAYS if way != failed}
    found = find_in(ran(others, failures={failed: "out of memory"}))
    assert found[0].code == "way-failed"
    assert found[0].severity == ("note" if failed == "threads" else "problem")
    assert "out of memory" in found[0].text
    assert len(found) > 1


def test_if_all_ways_fail_each_says_why() -> None:
    found = find_in(ran({}, failures=dict.fromkeys(WAYS, "no memory")))
    assert codes(found) == ["way-failed"] * 3


@given(rounds)
def test_a_way_that_is_beaten_by_another_is_chosen_only_where_each_is_beaten(
    figures: list[tuple[float, float, float]],
) -> None:
    columns = {way: [row[index] for row in figures] for index, way in enumerate(WAYS)}
    chosen = find_soonest(columns)
    unbeaten = [
        way
        for way in WAYS
        if not any(is_below(columns[other], columns[way], min_gain=MIN_GAIN) for other in WAYS)
    ]
    assert chosen in (unbeaten or WAYS)
    assert not unbeaten or chosen == unbeaten[0]


def test_speed_up_is_of_one_after_another_and_efficiency_of_the_best_there_could_be() -> None:
    what = ran({"sequential": [400.0] * 3, "threads": [200.0] * 3}, lanes=8)
    assert speed_up(what, "threads") == pytest.approx(1.5)  # of 200 ms of start and 400 of creation
    assert efficiency(what, "threads") == pytest.approx(0.75)  # two sessions gain twice at most
    assert speed_up(what, "processes") is None


def test_a_table_has_a_row_for_every_way_that_was_measured() -> None:
    table = tabulate(ran({"sequential": around(4), "processes": around(2)}))
    assert [row[0] for row in table.rows] == ["one after another", "in a process each"]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_on_the_cpu_there_are_two_to_four_sessions_and_on_gpus_one_each() -> None:
    assert [count_sessions(["cpu"], cores) for cores in (1, 2, 3, 64)] == [2, 2, 3, 4]
    assert count_sessions(["cuda:0", "cuda:1", "cuda:2"], 4) == 3
    assert count_sessions(["cuda:0"], 4) == 2
    assert count_lanes(["cpu"], 3) == 3
    assert count_lanes(["cuda:0", "cuda:1"], 64) == 2


def test_times_of_several_processes_count_from_before_the_first_began() -> None:
    times = (
        CreationTimes("1.31.1", imported_s, (begun_s,), (ready_s,), private_mb=10.0)
        for imported_s, begun_s, ready_s in ((100.2, 100.3, 100.8), (100.4, 100.5, 101.25))
    )
    figures = combine_times(100.0, list(times))
    assert figures.ready_ms == pytest.approx(1250)
    assert figures.start_ms == pytest.approx(400)
    assert figures.creating_ms == pytest.approx(950)
    assert figures.session_ms == pytest.approx((500, 750))
    assert figures.private_mb == 20


def test_times_of_one_process_are_from_its_first_session_to_its_last() -> None:
    figures = combine_times(0.0, [CreationTimes("1.31.1", 1.0, (1.0, 3.0), (3.0, 4.0), private_mb=10.0)])
    assert (figures.ready_ms, figures.creating_ms, figures.session_ms) == (4000, 3000, (2000, 1000))
