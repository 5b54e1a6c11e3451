"""What a profile of ONNX Runtime shows: recorded ones, and made-up runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.profiling import (
    Profile,
    ProfileEvents,
    TraceEvent,
    find_in_profile,
    own_times,
    parse_events,
    read_events,
    summarise_profile,
)
from ortprep.errors import LoadError

RECORDED = Path(__file__).parent / "recorded_profiles"
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


def events_of(*runs: tuple[tuple[str, str, str, float], ...], gap_us: float = 0.0) -> ProfileEvents:
    """Returns events of runs, each of nodes (name, operator, provider, µs) with a gap before every node."""
    session, nodes, at = [], [], 0.0
    for run in runs:
        begin = at
        for name, operator, provider, us in run:
            at += gap_us
            nodes.append(TraceEvent(name, at, us, operator, provider))
            at += us
        session.append(TraceEvent("model_run", begin, at - begin))
        at += 1
    return ProfileEvents(tuple(session), tuple(nodes))


@pytest.mark.parametrize("version", ["1.23.2", "1.31.1"])
def test_a_recorded_profile_is_understood(version):
    events = parse_events(json.loads((RECORDED / f"profile-{version}.json").read_text(encoding="utf-8")))
    assert any(event.name.startswith("model_loading") for event in events.session)
    profile = summarise_profile(events)
    assert profile.runs == 2
    assert set(profile.ran) == {CPU}
    assert {one.operator for one in profile.operators} >= {"Conv", "MaxPool"}
    assert profile.nodes_ms <= profile.run_ms


def test_the_first_run_does_not_count():
    slow, fast = (("n", "Conv", CPU, 9000.0),), (("n", "Conv", CPU, 10.0),)
    profile = summarise_profile(events_of(slow, fast, fast))
    assert profile.operators[0].ms == pytest.approx(0.01)


def test_one_run_is_too_few():
    with pytest.raises(LoadError, match="two runs"):
        summarise_profile(events_of((("n", "Conv", CPU, 1.0),)))


def codes(profile: Profile, *, on_gpu: bool, steady_ms: float = 0.001) -> set[str]:
    return {one.code for one in find_in_profile(profile, on_gpu=on_gpu, steady_ms=steady_ms)}


def test_a_loop_takes_what_its_body_does_not():
    nodes = [
        TraceEvent("loop", 0.0, 100.0, "Loop", CPU),
        *(TraceEvent("m", 5.0 + 9 * i, 8.0, "MatMul", CPU) for i in range(10)),
    ]
    own = own_times([*nodes, TraceEvent("other", 50.0, 8.0, "Relu", CPU, thread=7)])
    assert sum(one.us for one in own) == 100 + 8
    assert next(one.us for one in own if one.name == "loop") == 20
    session = (TraceEvent("model_run", 0.0, 101.0), TraceEvent("model_run", 200.0, 101.0))
    later = [replace(one, start_us=one.start_us + 200) for one in nodes]
    profile = summarise_profile(ProfileEvents(session, own_times([*nodes, *later])))
    assert [(one.operator, one.nodes) for one in profile.operators] == [("MatMul", 1), ("Loop", 1)]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 2)), max_size=30))
def test_no_time_of_a_node_is_below_zero(found):
    own = own_times(
        [TraceEvent(f"n{i}", at, us, "Add", CPU, thread) for i, (at, us, thread) in enumerate(found)]
    )
    assert len(own) == len(found)
    assert all(one.us >= 0 for one in own)


def test_names_of_nodes_need_not_be_text(tmp_path):
    (tmp_path / "p.json").write_bytes(
        b'[{"cat":"Node","ph":"X","ts":1,"dur":2,"pid":1,"tid":1,"name":"\xff_kernel_time","args":{"op_name":"Add"}}]'
    )
    assert [one.operator for one in read_events(tmp_path / "p.json").nodes] == ["Add"]
    (tmp_path / "p.json").write_bytes(b"[{")
    with pytest.raises(LoadError, match="not a profile"):
        read_events(tmp_path / "p.json")


def test_time_between_nodes_is_found_by_runs_without_the_profiler():
    run = tuple((f"n{i}", "Add", CPU, 1.0) for i in range(30))
    profile = summarise_profile(events_of(run, run, gap_us=5))
    assert "time-between-nodes" in codes(profile, on_gpu=False, steady_ms=0.060)
    # The profiler's own work lies between nodes too; a run as long as its nodes has nothing there.
    assert "time-between-nodes" not in codes(profile, on_gpu=False, steady_ms=0.030)


def test_times_of_launches_are_not_taken_for_times_of_operators():
    run = (("a", "Conv", CUDA, 5.0),)
    found = codes(summarise_profile(events_of(run, run)), on_gpu=True)
    assert "times-are-of-launches" in found
    assert "slowest-operator" not in found


def test_the_slowest_operator_is_named():
    run = (("a", "Conv", CPU, 5.0), ("b", "Relu", CPU, 15.0))
    (found,) = find_in_profile(summarise_profile(events_of(run, run)), on_gpu=False, steady_ms=0.02)
    assert (found.code, found.text) == (
        "slowest-operator",
        "Relu: 0.01 ms a run, 75% of the time of its nodes",
    )


@pytest.mark.parametrize("document", [None, 3, {}, {"traceEvents": 4}])
def test_what_is_no_profile_is_refused(document):
    with pytest.raises(LoadError, match="not a profile"):
        parse_events(document)
