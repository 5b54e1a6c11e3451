"""Starts of real models, taken apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.doctor.doctor_model import DoctorModel, plan_on
from ortprep.doctor.initialisation.tracing import trace_plan
from ortprep.doctor.sampling import examine_source
from tests.builders import conv_net, write_model


@pytest.fixture
def subject(tmp_path: Path) -> DoctorModel:
    return examine_source(write_model(conv_net(), tmp_path / "conv.onnx"), tmp_path)


def test_a_trace_names_the_phases_and_the_transformers(subject: DoctorModel) -> None:
    trace = trace_plan(plan_on(subject.require_source(), "cpu"))
    names = {phase.name for phase in trace.initialisation.phases}
    assert {"parse", "optimise", "kernels", "finish"} <= names
    assert "ConstantFolding" in {one.name for one in trace.initialisation.transformers}
    assert trace.init_ms > trace.initialisation.ms("finish")
    assert trace.onnxruntime_ms > 0
