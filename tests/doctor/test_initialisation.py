"""What recorded logs and profiles of ONNX Runtime show of a start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.codec import decode
from ortprep.doctor.doctor_model import plan_on
from ortprep.doctor.initialisation import ACCOUNTED, Start, find_in_start
from ortprep.doctor.initialisation_phases import (
    LogLine,
    Timeline,
    parse_log,
    read_loaded_us,
    split_phases,
    trace_plan,
)
from tests.builders import conv_net, write_model

RECORDED = Path(__file__).parent / "recorded_logs"
DEFAULTS = ("1.23.2", "1.24.4", "1.25.1", "1.26.0", "1.27.0", "1.31.1")


def read_recorded(name):
    head, _, text = (RECORDED / f"{name}.log").read_text(encoding="utf-8").partition("\n")
    timeline = decode(Timeline, json.loads(head.removeprefix("# ")))
    return parse_log(text, begin_ns=timeline.begin_ns), timeline


def total_ms(timeline):
    return (timeline.end_ns - timeline.begin_ns) / 1e6


@pytest.mark.parametrize("name", [*(f"default-{v}" for v in DEFAULTS), "prepared-1.23.2", "prepared-1.31.1"])
def test_the_phases_of_a_recorded_log_add_up_to_the_whole(name):
    lines, timeline = read_recorded(name)
    found = split_phases(lines, timeline)
    assert sum(found.values()) == pytest.approx(total_ms(timeline))
    assert min(found.values()) > 0
    assert "inline" not in found, "the model has no functions"
    assert "register" in found


@pytest.mark.parametrize("version", DEFAULTS)
def test_every_version_s_log_is_understood(version):
    lines, timeline = read_recorded(f"default-{version}")
    found = split_phases(lines, timeline)
    assert found.keys() >= {
        "enter",
        "parse",
        "weights_out",
        "optimise",
        "plan",
        "weights_in",
        "kernels",
        "finish",
    }
    # What is not explained is little: the time after the last line, and between lines without a meaning.
    assert found["finish"] < 0.1 * sum(found.values())


@pytest.mark.parametrize("version", ["1.23.2", "1.31.1"])
def test_a_prepared_model_spends_next_to_nothing_on_optimising(version):
    default = split_phases(*read_recorded(f"default-{version}"))
    prepared = split_phases(*read_recorded(f"prepared-{version}"))
    ours, theirs = (
        sum(one.get(phase, 0.0) for phase in ("optimise", "parse", "weights_out"))
        for one in (prepared, default)
    )
    assert ours < 0.2 * theirs


def test_a_log_in_local_time_is_set_right():
    # Recorded with the clock of India, five and a half hours ahead.
    lines, timeline = read_recorded("default-1.31.1")
    assert all(timeline.begin_ns <= line.at_ns <= timeline.end_ns for line in lines[:-1])


@given(st.integers(-56, 56), st.integers(0, 10**12))
def test_any_zone_of_quarters_of_an_hour_is_recognised(quarters, after_ns):
    begin_ns = 1_795_323_257_222_877_564
    after_ns %= 400 * 10**9
    at_ns = begin_ns + after_ns + quarters * 15 * 60 * 10**9
    seconds, rest = divmod(at_ns, 10**9)
    from datetime import UTC, datetime

    second = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    text = f"{second}.{rest:09d} [I:onnxruntime:, inference_session.cc:1 Initialize] Initializing session."
    (line,) = parse_log(text, begin_ns=begin_ns)
    assert line.at_ns == begin_ns + after_ns


def test_what_is_no_line_is_left_out():
    text = "Trace\n\x1b[0;93m2026-11-22 04:39:14.2046 [W:onnxruntime:, a.cc:3 f()] careful\x1b[m\n2026-\n"
    (line,) = parse_log(text, begin_ns=0)
    assert line.message.startswith("careful")


@pytest.mark.attack
def test_a_line_of_no_date_is_not_read():
    """ONNX Runtime logs names out of a model as they are, line breaks included."""
    forged = "2026-13-45 99:00:00.0 [I:onnxruntime:, session.cc:1 run] forged"
    assert parse_log(forged, begin_ns=0) == ()


@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_whatever_is_logged_the_phases_add_up(rng, count):
    messages = [line.message for line in read_recorded("default-1.31.1")[0]]
    at, lines = 1_000_000, []
    for _ in range(count):
        at += rng.randint(0, 10**7)
        lines.append(LogLine(at, rng.choice([*messages, "who knows"])))
    timeline = Timeline(1_000_000, rng.choice([None, rng.randint(0, at)]), at + 500, "1.31.1")
    found = split_phases(lines, timeline)
    assert sum(found.values()) == pytest.approx(total_ms(timeline))
    assert min(found.values()) >= 0


def start_of(*phases, **changes):
    start = Start(
        numpy_ms=0.0,
        onnxruntime_ms=0.0,
        phases=dict(phases),
        first_extra_ms=0.0,
        steady_ms=1.0,
        measured_init_ms=sum(dict(phases).values()),
    )
    return replace(start, **changes)


def codes(start):
    return {finding.code: finding.text for finding in find_in_start(start)}


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        ("optimise", "optimised-at-every-load"),
        ("inline", "optimised-at-every-load"),
        ("parse", "weights-inside-the-model-file"),
        ("weights_out", "weights-inside-the-model-file"),
    ],
)
def test_a_phase_that_takes_long_is_found_with_what_removes_it(phase, code):
    found = find_in_start(start_of((phase, 500.0), ("finish", 1.0)))
    advice = next(one for one in found if one.code == code)
    assert "500 ms of 502 ms" in advice.text
    assert advice.hint
    assert code not in codes(start_of((phase, 5.0), ("finish", 500.0)))


def test_what_cannot_apply_is_not_advised():
    phases = [("optimise", 50.0), ("parse", 50.0), ("weights_in", 50.0)]
    advised = {one.code for one in find_in_start(start_of(*phases)) if one.severity == "advice"}
    assert advised == {"optimised-at-every-load", "weights-inside-the-model-file"}
    assert "weights-inside-the-model-file" not in codes(start_of(*phases, weights_outside=True))
    assert not codes(start_of(*phases, is_prepared=True)).keys() & advised


@given(st.floats(1, 1e6), st.floats(0.5, 2))
def test_whether_the_phases_add_up_is_said(measured_ms, share):
    found = codes(start_of(("finish", measured_ms * share), measured_init_ms=measured_ms))
    assert ("phases-add-up" in found) == (abs(measured_ms * share / measured_ms - 1) <= ACCOUNTED)
    assert ("phases-add-up" in found) != ("phases-do-not-add-up" in found)


def test_a_trace_of_a_real_model_names_the_phases(tmp_path):
    trace = trace_plan(plan_on(str(write_model(conv_net(), tmp_path / "conv.onnx")), "cpu"))
    assert {"parse", "optimise", "kernels", "finish"} <= trace.phases.keys()
    assert trace.init_ms > trace.phases["finish"]
    assert trace.onnxruntime_ms > 0


@pytest.mark.parametrize("version", ["1.23.2", "1.31.1"])
def test_a_recorded_profile_says_when_the_model_was_parsed(version):
    loaded_us = read_loaded_us((RECORDED / f"profile-{version}.json").read_bytes())
    assert 0 < loaded_us < 1e6


def test_names_in_a_profile_need_not_be_text():
    events = b'{"name": "\xff\x01", "ts": 1, "dur": 1}, {"name": "model_loading_uri", "ts": 2, "dur": 3}'
    assert read_loaded_us(b"[" + events + b"]") == 5
    assert read_loaded_us(b"[]") is None
