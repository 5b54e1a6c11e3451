"""Starts of real models, taken apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.doctor.doctor_model import DoctorModel, plan_on
from ortprep.doctor.initialisation.start import diagnose_initialisation
from ortprep.doctor.initialisation.tracing import trace_plan
from ortprep.doctor.profiling import diagnose_profile
from ortprep.doctor.sampling import examine_bundle, examine_source
from tests.builders import conv_net, write_model
from tests.runtime.builders import write_bundle


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


def test_a_start_is_shown_as_a_waterfall_and_told_in_figures(subject: DoctorModel) -> None:
    found = diagnose_initialisation(subject, rounds=1)
    waterfall, transformers = found.tables[:2]
    assert waterfall.bars == "ms"
    index = waterfall.columns.index("ms")
    total = found.figures["default"]["total_ms"]
    assert sum(row[index].value or 0 for row in waterfall.cells) == pytest.approx(total)
    assert transformers.rows
    assert len([one for one in found.findings if one.code.startswith("phases-")]) == 1


def test_a_bundle_alone_can_be_taken_apart(tmp_path: Path) -> None:
    found = diagnose_initialisation(examine_bundle(write_bundle(tmp_path / "linear"), tmp_path), rounds=1)
    assert set(found.figures) == {"device", "prepared"}


def test_a_trace_for_perfetto_is_kept(tmp_path: Path, subject: DoctorModel) -> None:
    import json

    found = diagnose_profile(subject, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    complete = [event for event in events if event["ph"] == "X"]
    assert {"name", "ts", "dur", "pid", "tid"} <= set.intersection(*(set(event) for event in complete))
    assert "trace-written" in {one.code for one in found.findings}
    assert found.figures["ran"] == {"CPUExecutionProvider": sum(found.figures["ran"].values())}
