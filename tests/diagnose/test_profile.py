from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.diagnose.profiling.profile import Profile, family_of, find_in_profile, summarise_profile
from pipeline.diagnose.profiling.trace_events import Event, ProfileEvents, parse_events
from pipeline.errors import LoadError

RECORDED = Path(__file__).parent / "recorded"
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


def events_of(*runs: tuple[tuple[str, str, str, float], ...], gap_us: float = 0.0) -> ProfileEvents:
    """Returns events of runs, each of nodes (name, operator, provider, µs) with a gap before every node."""
    session, nodes, at = [], [], 0.0
    for run in runs:
        begin = at
        for name, operator, provider, us in run:
            at += gap_us
            nodes.append(Event(name, at, us, operator, provider))
            at += us
        session.append(Event("model_run", begin, at - begin))
        at += 1
    return ProfileEvents(tuple(session), tuple(nodes), ())


@pytest.mark.parametrize("version", ["1.23.2", "1.31.1"])
def test_a_recorded_profile_is_understood(version: str) -> None:
    events = parse_events(json.loads((RECORDED / f"profile-{version}.json").read_text(encoding="utf-8")))
    assert any(event.name.startswith("model_loading") for event in events.session)
    profile = summarise_profile(events, assigned={})
    assert profile.runs == 2
    assert next(iter(profile.families())) == "convolution"
    assert set(profile.ran) == {CPU}
    assert {one.operator for one in profile.operators} >= {"Conv", "MaxPool"}
    assert profile.nodes_ms <= profile.run_ms
    assert sum(profile.families().values()) == pytest.approx(1)


def test_the_first_run_does_not_count() -> None:
    slow, fast = (("n", "Conv", CPU, 9000.0),), (("n", "Conv", CPU, 10.0),)
    profile = summarise_profile(events_of(slow, fast, fast), assigned={})
    assert profile.operators[0].ms == pytest.approx(0.01)
    assert events_of(slow, fast, fast).first_run_excess() == {"Conv": pytest.approx(8.99)}


def test_one_run_is_too_few() -> None:
    with pytest.raises(LoadError, match="two runs"):
        summarise_profile(events_of((("n", "Conv", CPU, 1.0),)), assigned={})
    assert events_of((("n", "Conv", CPU, 1.0),)).first_run_excess() == {}


def codes(profile: Profile, *, on_gpu: bool) -> set[str]:
    return {finding.code for finding in find_in_profile(profile, on_gpu=on_gpu)}


def test_nodes_that_fell_back_to_the_cpu_are_named() -> None:
    run = (("a", "Conv", CUDA, 5.0), ("b", "NonZero", CPU, 50.0), ("m", "MemcpyToHost", CUDA, 1.0))
    profile = summarise_profile(events_of(run, run), assigned={})
    found = find_in_profile(profile, on_gpu=True)
    text = next(one.text for one in found if one.code == "nodes-on-the-cpu")
    assert "1 of 3 nodes" in text
    assert "NonZero" in text
    assert "Conv" not in text
    assert "copies-between-devices" in codes(profile, on_gpu=True)
    assert profile.copies() == 1
    assert "nodes-on-the-cpu" not in codes(profile, on_gpu=False)


def test_a_run_all_on_the_device_is_said_to_be() -> None:
    run = (("a", "Conv", CUDA, 5.0),)
    assert "all-on-the-device" in codes(summarise_profile(events_of(run, run), assigned={}), on_gpu=True)


def test_time_between_nodes_is_found() -> None:
    run = tuple((f"n{i}", "Add", CPU, 1.0) for i in range(9))
    assert "time-between-nodes" in codes(
        summarise_profile(events_of(run, run, gap_us=5), assigned={}), on_gpu=False
    )
    run = (("n", "Add", CPU, 100.0),)
    assert "time-between-nodes" not in codes(
        summarise_profile(events_of(run, run, gap_us=5), assigned={}), on_gpu=False
    )


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("Conv", "convolution"),
        ("FusedMatMul", "matrix product"),
        ("FusedGemm", "matrix product"),
        ("SkipLayerNormalization", "normalisation"),
        ("MultiHeadAttention", "attention"),
        ("LSTM", "recurrence"),
        ("ReorderInput", "layout"),
        ("MemcpyFromHost", "copies between devices"),
        ("Relu", "other"),
    ],
)
def test_operators_have_families(operator: str, family: str) -> None:
    assert family_of(operator) == family


@pytest.mark.parametrize("document", [None, 3, {}, {"traceEvents": 4}])
def test_what_is_no_profile_is_refused(document: object) -> None:
    with pytest.raises(LoadError, match="not a profile"):
        parse_events(document)


def test_events_of_other_forms_are_left_out() -> None:
    rows = [
        1,
        {},
        {"ph": "X", "ts": "1", "dur": 2},
        {"ph": "B", "ts": 1, "dur": 2},
        {"ph": "X", "ts": True, "dur": 1},
    ]
    assert parse_events(rows) == ProfileEvents((), (), ())
