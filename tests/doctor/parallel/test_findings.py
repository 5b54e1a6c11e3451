"""What made-up figures show of sessions at once, of workers, and of the interpreter's lock."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.codec import encode
from ortprep.doctor.diagnosis import Severity
from ortprep.doctor.parallel import findings
from ortprep.doctor.parallel.experiment import build_tables, count_sessions, place_models, plan_workers
from ortprep.doctor.parallel.findings import (
    MIN_GAIN,
    WAYS,
    ParallelRun,
    PlacedModel,
    Way,
    WorkerSetup,
    choose_soonest,
    find_in,
    slow_down,
)
from ortprep.doctor.parallel.gil import Call, GilObservations
from ortprep.doctor.parallel.sessions import GroupFigures
from ortprep.measuring.comparison import is_below
from ortprep.measuring.rounds import InterleavedRuns

ON_CPU = (PlacedModel("a", "cpu", 1), PlacedModel("b", "cpu", 1))
APART = (PlacedModel("a", "cuda:0", None), PlacedModel("b", "cuda:1", None))
SHARED = (PlacedModel("a #1", "cuda:1", None), PlacedModel("a #2", "cuda:1", None))

FREE = (Call(400, 7, 600),) * 3
STUCK = (Call(400, 400, 0),) * 3
SHORT = (Call(3, 3, 0),) * 3
RELEASED = GilObservations("1.31.1", FREE, FREE, (Call(60, 0.7, 100),) * 3)
HELD = replace(RELEASED, onnxruntime="1.30.0", create=STUCK)

SETUPS = (WorkerSetup(4, None), WorkerSetup(4, 1))
NOTHING: InterleavedRuns[Way, GroupFigures] = InterleavedRuns({}, {}, 0.0)
NOISE = (0.99, 1.0, 1.01)


def figures(creating_ms: float = 1000, runs_ms: Sequence[float] = (10, 10)) -> tuple[GroupFigures, ...]:
    return tuple(
        GroupFigures(
            onnxruntime="1.31.1",
            ready_ms=200 + creating_ms * noise,
            start_ms=200,
            creating_ms=creating_ms * noise,
            private_mb=100,
            run_ms=tuple(run_ms * noise for run_ms in runs_ms),
            runs_per_s=sum(1e3 / run_ms / noise for run_ms in runs_ms),
        )
        for noise in NOISE
    )


def ran(
    ways: Mapping[Way, tuple[GroupFigures, ...]],
    *,
    models: tuple[PlacedModel, ...] = ON_CPU,
    failures: Mapping[Way, str] | None = None,
    gil: GilObservations = RELEASED,
    lanes: int = 2,
) -> ParallelRun:
    return ParallelRun(models, lanes, InterleavedRuns(ways, failures or {}, 4 * 3600.0), (), None, gil)


def making(*creating_ms: float) -> dict[Way, tuple[GroupFigures, ...]]:
    return {way: figures(each) for way, each in zip(WAYS, creating_ms, strict=False)}


def running(alone: Sequence[float], threads: Sequence[float], processes: Sequence[float]) -> ParallelRun:
    ways = zip(WAYS, (alone, threads, processes), strict=True)
    return ran({way: figures(1000, runs_ms) for way, runs_ms in ways})


def serving(default_ms: float, limited_ms: float) -> ParallelRun:
    both = zip(SETUPS, (default_ms, limited_ms), strict=True)
    rounds = {str(setup): figures(runs_ms=(run_ms,) * 4) for setup, run_ms in both}
    return replace(ran({}, models=()), setups=SETUPS, workers=InterleavedRuns(rounds, {}, 1.0))


def watched(create: tuple[Call, ...] = FREE, run: tuple[Call, ...] = FREE) -> ParallelRun:
    return ParallelRun((), 1, NOTHING, (), None, replace(RELEASED, create=create, run=run))


def codes(run: ParallelRun) -> list[str]:
    return [finding.code for finding in find_in(run)]


class RunCase(NamedTuple):
    """Measurements, and a finding that must be among what is said of them."""

    code: str
    severity: Severity
    run: ParallelRun


CASES = (
    RunCase("way-failed", "problem", ran({}, failures={"processes": "out of memory"})),
    RunCase("way-failed", "problem", ran({}, failures={"threads": "no"}, models=APART)),
    RunCase("way-failed", "note", ran({}, failures={"threads": "SIGSEGV"})),
    RunCase(
        "way-failed",
        "problem",
        replace(serving(10, 10), workers=InterleavedRuns({}, {str(SETUPS[0]): "no memory"}, 1.0)),
    ),
    RunCase("rounds-cut", "note", ran({})),
    RunCase("soonest-way", "advice", ran(making(4000, 4000, 2000))),
    RunCase("soonest-way", "advice", ran(making(4000, 2000, 4000), models=APART)),
    RunCase("soonest-way", "note", ran(making(4000, 2000, 4000))),
    RunCase("soonest-way", "note", ran(making(4000, 4000, 4000))),
    RunCase("threads-contend", "advice", running((10, 10), (20, 20), (10, 10))),
    RunCase("as-fast-as-alone", "ok", running((10, 10), (10, 10), (10, 10))),
    RunCase("slower-than-alone", "note", running((10, 10), (20, 20), (20, 20))),
    RunCase("default-threads-cost", "advice", serving(20, 10)),
    RunCase("default-threads-as-good", "ok", serving(10, 10)),
    RunCase("gil-held", "advice", watched(create=STUCK)),
    RunCase("gil-held", "problem", watched(run=STUCK)),
    RunCase("gil-released", "ok", watched()),
    RunCase("gil-unclear", "note", watched(create=SHORT)),
)


def test_every_code_has_a_case():
    written = re.findall(r'Finding\(\s*"([a-z-]+)"', inspect.getsource(findings))
    assert set(written) == {case.code for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_every_case_is_found_with_its_severity_and_a_step_to_take(case):
    found = find_in(case.run)
    assert (case.code, case.severity) in {(finding.code, finding.severity) for finding in found}
    assert all(finding.hint or finding.severity in ("ok", "note") for finding in found)
    for table in build_tables(case.run):
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    assert json.loads(json.dumps(encode(case.run)))


@pytest.mark.parametrize("done", range(3))
def test_too_few_rounds_are_said_to_be_and_compare_nothing(done):
    whole = making(1000, 500, 300)
    cut = ran({way: rounds[:done] for way, rounds in whole.items() if done})
    assert codes(cut) == ["rounds-cut", "gil-released", "gil-released"]
    text = find_in(cut)[0].text
    assert "up to 240 minutes" in text
    assert f"there were {done} instead of 3" in text


def test_threads_on_one_device_are_told_that_nobody_promised_them():
    failed = find_in(ran({}, failures={"threads": "SIGSEGV"}))[0]
    soonest = find_in(ran(making(4000, 2000, 2010)))[0]
    assert (failed.code, soonest.code) == ("way-failed", "soonest-way")
    assert "#27089" in failed.text
    assert "#27089" in soonest.text


def test_processes_that_gain_are_advised_with_the_call_for_these_devices():
    for models, call in (
        (SHARED, 'SessionPool("artifacts/NAME", PoolConfig(devices=["cuda:1"], workers_per_device=2))'),
        (APART, 'SessionPool({"a": "artifacts/a", "b": "artifacts/b"})'),
    ):
        found = find_in(ran(making(4000, 4000, 2000), models=models))[0]
        assert (found.code, found.hint) == ("soonest-way", call)
        assert "4200 ms one after another" in found.text


@pytest.mark.parametrize("failed", WAYS)
def test_a_way_that_fails_is_said_and_the_others_are_compared(failed):
    others = {way: rounds for way, rounds in making(1000, 1000, 1000).items() if way != failed}
    found = find_in(ran(others, failures={failed: "out of memory"}))
    assert found[0].code == "way-failed"
    assert "out of memory" in found[0].text
    assert len(found) > 3


def test_threads_that_are_slower_than_processes_contend_and_only_the_models_that_suffer_are_named():
    """As was reported of one process with ten GPUs: 0.091 ms alone, 0.33 in threads, 0.090 in processes."""
    found = {one.code: one for one in find_in(running((0.091,) * 2, (0.33, 0.091), (0.09,) * 2))}
    assert {"threads-contend", "as-fast-as-alone"} <= found.keys()
    text = found["threads-contend"].text
    assert "a (0.091 ms one after another, 0.33 ms in threads of one process" in text
    assert "b (" not in text


def test_what_is_slower_than_alone_in_the_better_way_too_is_no_matter_of_threads():
    found = {one.code: one for one in find_in(running((10, 10), (20, 20), (20, 20)))}
    assert "threads-contend" not in found
    assert "memory bandwidth" in str(found["slower-than-alone"].hint)
    run = replace(running((10, 10), (20, 20), (20, 20)), models=SHARED)
    hints = {one.code: one.hint for one in find_in(run)}
    assert hints["slower-than-alone"] == "give each a device of its own"
    assert slow_down(run, 0, "threads") == pytest.approx(2)


@given(st.floats(0.01, 1e4), st.floats(0.5, 0.95), st.sampled_from(WAYS))
def test_contention_of_less_than_a_tenth_is_never_reported(run_ms, share, slowest):
    runs = dict.fromkeys(WAYS, (run_ms, run_ms))
    runs[slowest] = (run_ms * (1 + share / 10),) * 2
    found = codes(ran({way: figures(1000, each) for way, each in runs.items()}))
    assert not {"threads-contend", "slower-than-alone"} & set(found)


def test_what_default_threads_cost_is_said_with_the_setting_to_use():
    found = {one.code: one for one in find_in(serving(20, 10))}["default-threads-cost"]
    assert "4 workers, 1 thread each: 400 runs per s, 2.00× of 200 with default threads" in found.text
    assert "ORTPREP_WORKERS=4" in str(found.hint)
    assert "default-threads-cost" not in codes(serving(10, 20))


def test_workers_are_tried_with_the_threads_that_load_sets_beside_the_default():
    setups = plan_workers((2, 4))
    assert {setup.workers for setup in setups if setup.threads is None} == {2, 4}
    assert all(setup.threads >= 1 for setup in setups if setup.threads is not None)
    assert WorkerSetup(1, 2) not in plan_workers((2, 4))
    assert len({str(setup) for setup in setups}) == 4


def test_on_the_cpu_there_are_two_to_four_sessions_and_on_gpus_one_each():
    assert [count_sessions(["cpu"], cores) for cores in (1, 2, 3, 64)] == [2, 2, 3, 4]
    assert count_sessions(["cuda:0", "cuda:1", "cuda:2"], 4) == 3
    assert count_sessions(["cuda:0"], 4) == 2


rounds = st.lists(st.tuples(*[st.floats(0.1, 1e5)] * 3), min_size=3, max_size=7)


@given(rounds)
def test_a_way_that_is_beaten_by_another_is_chosen_only_where_each_is_beaten(rows):
    columns = {way: [row[index] for row in rows] for index, way in enumerate(WAYS)}
    chosen = choose_soonest(columns)
    unbeaten = [
        way
        for way in WAYS
        if not any(is_below(columns[other], columns[way], min_gain=MIN_GAIN) for other in WAYS)
    ]
    assert chosen in (unbeaten or WAYS)
    assert not unbeaten or chosen == unbeaten[0]


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.lists(st.sampled_from(("cpu", "cuda:0", "cuda:1")), min_size=1, max_size=4, unique=True),
    st.integers(1, 64),
)
def test_every_model_has_a_device_and_a_name_of_its_own_and_the_cores_are_shared(names, devices, cores):
    placed = place_models(names, devices, cores=cores)
    assert len({model.name for model in placed}) == len(names)
    assert {model.device for model in placed} == set(devices[: len(names)])
    threads = [model.threads for model in placed if model.threads is not None]
    assert all(model.threads is None for model in placed if model.device != "cpu")
    assert sum(threads) <= max(cores, len(threads))
    assert len(set(threads)) <= 1
