"""What a start shows, and which measure would remove which part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.doctor_model import plan_on
from ortprep.doctor.initialisation.phases import Initialisation, Phase, PhaseName
from ortprep.doctor.initialisation.start import ACCOUNTED, Start, find_in_start
from ortprep.doctor.initialisation.tracing import trace_plan
from tests.builders import conv_net, write_model


def start_of(*phases: tuple[PhaseName, float], **changes: float | bool) -> Start:
    initialisation = Initialisation(tuple(Phase(name, ms) for name, ms in phases), ())
    start = Start(
        numpy_ms=0.0,
        onnxruntime_ms=0.0,
        initialisation=initialisation,
        first_extra_ms=0.0,
        steady_ms=1.0,
        measured_init_ms=initialisation.total_ms,
    )
    return replace(start, **changes)  # type: ignore[arg-type]


def codes(start: Start) -> dict[str, str]:
    return {finding.code: finding.text for finding in find_in_start(start)}


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        ("optimise", "optimised-at-every-load"),
        ("inline", "optimised-at-every-load"),
        ("parse", "weights-inside-the-model-file"),
        ("weights_out", "weights-inside-the-model-file"),
        ("prepack", "prepacked-at-every-load"),
    ],
)
def test_a_phase_that_takes_long_is_found_with_what_removes_it(phase, code):
    found = find_in_start(start_of((phase, 500.0), ("finish", 1.0)))
    advice = next(one for one in found if one.code == code)
    assert "500 ms of 502 ms" in advice.text
    assert advice.hint
    assert code not in codes(start_of((phase, 5.0), ("finish", 500.0)))


def test_what_cannot_apply_is_not_advised():
    phases: list[tuple[PhaseName, float]] = [("optimise", 50.0), ("parse", 50.0), ("weights_in", 50.0)]
    advised = {one.code for one in find_in_start(start_of(*phases)) if one.severity == "advice"}
    assert advised == {"optimised-at-every-load", "weights-inside-the-model-file"}
    assert "weights-inside-the-model-file" not in codes(start_of(*phases, weights_outside=True))
    assert not codes(start_of(*phases, is_prepared=True)).keys() & advised


def test_a_first_run_that_takes_long_is_said_to():
    found = codes(start_of(("finish", 10.0), first_extra_ms=90.0))
    assert "90 ms longer" in found["first-run-takes-long"]


@given(st.floats(1, 1e6), st.floats(0.5, 2))
def test_whether_the_phases_add_up_is_said(measured_ms, share):
    found = codes(start_of(("finish", measured_ms * share), measured_init_ms=measured_ms))
    assert ("phases-add-up" in found) == (abs(measured_ms * share / measured_ms - 1) <= ACCOUNTED)
    assert ("phases-add-up" in found) != ("phases-do-not-add-up" in found)
    roughly = codes(start_of(("finish", measured_ms * share), measured_init_ms=measured_ms, is_apart=False))
    assert "phases-do-not-add-up" not in roughly
    assert "phases-add-up" in roughly


def test_a_trace_of_a_real_model_names_the_phases_and_the_transformers(tmp_path):
    trace = trace_plan(plan_on(str(write_model(conv_net(), tmp_path / "conv.onnx")), "cpu"))
    names = {phase.name for phase in trace.initialisation.phases}
    assert {"parse", "optimise", "kernels", "finish"} <= names
    assert "ConstantFolding" in {one.name for one in trace.initialisation.transformers}
    assert trace.init_ms > trace.initialisation.ms("finish")
    assert trace.onnxruntime_ms > 0
