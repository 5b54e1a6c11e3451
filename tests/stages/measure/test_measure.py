from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import Requirements, Variant, VersionRange
from ortprep.bundle.manifest import SourceRecord
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.children.answers import Answers
from ortprep.errors import StageError
from ortprep.runtime.loading.session import CPU, CUDA, build_session, default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.models import MeasureSpec, ModelSpec, SourceSpec, TuneSpec
from ortprep.stages.core.contract import Context, Plan, TaskId, Upstream
from ortprep.stages.core.inputs.samples import Sample
from ortprep.stages.core.results import FetchResult, MeasureResult, PreparedResult
from ortprep.stages.measure.candidates import device_of
from ortprep.stages.measure.stage import MeasureStage
from ortprep.stages.verify.reference import ReferenceAnswers, write_reference
from tests.builders import conv_net

pytestmark = pytest.mark.slow

SPEC = ModelSpec(
    name="net",
    source=SourceSpec(path="net.onnx"),
    targets=("cpu",),
    measure=MeasureSpec(rounds=3, cold_rounds=1, steady_s=0.01),
    tune=TuneSpec(max_trials=0),
)
PROVIDERS = (ProviderRecord(CPU),)


@pytest.fixture(autouse=True)
def private_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def fetch_result() -> FetchResult:
    source = SourceRecord("path", "net.onnx", "", (), {}, 8, {}, 0)
    return FetchResult("net.onnx", source, ModelInterface((), (), {}, external=False))


def optimize_result() -> PreparedResult:
    options, needs = SessionOptionsRecord("ORT_DISABLE_ALL"), Requirements(VersionRange("1.23"), (CPU,))
    variant = Variant("cpu", "cpu", "net_optimized.onnx", (), options, PROVIDERS, needs)
    return PreparedResult(variant, "all", (), "1.31.1")


def build_context(tmp_path: Path, *, spec: ModelSpec = SPEC) -> Context:
    """Lays out what the earlier stages leave, with graphs that ONNX Runtime itself wrote."""
    folders = {name: tmp_path / name for name in ("fetch", "cpu", "portable", "verify", "out")}
    for folder in folders.values():
        folder.mkdir()
    source = folders["fetch"] / "net.onnx"
    onnx.save(conv_net(), str(source))
    for variant, level in (("cpu", "ORT_ENABLE_ALL"), ("portable", "ORT_ENABLE_BASIC")):
        written = {"optimized_model_filepath": str(folders[variant] / "net_optimized.onnx")}
        build_session(default_plan(str(source), CPU, level=level, attributes=written))
    sample = folders["verify"] / "image.npz"
    write_tensors(sample, {"image": np.random.default_rng(0).random((2, 3, 16, 16), np.float32)})
    samples = (Sample(str(sample), "image=[2, 3, 16, 16]", 1536),)
    write_reference(folders["verify"], ReferenceAnswers(samples, Answers((), (), ((),)), ()))
    said: list[str] = []
    return Context(
        plan=Plan(spec, ("cpu",), {}),
        variant="cpu",
        upstream={
            TaskId("fetch"): Upstream(folders["fetch"], encode(fetch_result())),
            TaskId("optimize", "cpu"): Upstream(folders["cpu"], encode(optimize_result())),
            TaskId("optimize", "portable"): Upstream(folders["portable"], encode(optimize_result())),
            TaskId("verify", "cpu"): Upstream(folders["verify"], {}),
            TaskId("verify", "portable"): Upstream(folders["verify"], {}),
        },
        folder=folders["out"],
        say=said.append,
    )


def said(context: Context) -> list[str]:
    lines: list[str] = context.say.__self__  # type: ignore[attr-defined]
    return lines


def measured(context: Context) -> tuple[Mapping[str, Any], MeasureResult]:
    result = MeasureStage().run(context)
    return result, decode(MeasureResult, result)


def test_every_plan_is_measured_with_a_warm_and_with_a_cold_cache(tmp_path):
    context = build_context(tmp_path)
    _, result = measured(context)
    warm, cold = result.measurements
    # A model this small may or may not be faster; if not, the rounds are doubled before that is believed.
    assert warm.rounds == 6 or (warm.rounds, result.decision.shipped) == (3, "prepared")
    assert (warm.cache, cold.cache, cold.rounds) == ("warm", "cold", 1)
    for record, forked in ((warm, ["forked"]), (cold, [])):
        assert [figures.plan for figures in record.plans] == ["default", "prepared", "portable", *forked]
        assert all(figures.init_ms.count == record.rounds for figures in record.plans)
        assert record.shapes == "image=[2, 3, 16, 16]"
        assert not record.skipped
    for figures in warm.plans:
        assert 0 < figures.init_ms.median < figures.first_result_ms.median
        assert figures.private_mb.median > 0
    assert (result.decision.reason in said(context)) == (result.decision.shipped != "prepared")


def test_a_plan_that_fails_is_recorded_and_the_rest_compared(tmp_path):
    spec = SPEC.model_copy(update={"measure": MeasureSpec(rounds=3, cold_rounds=0, steady_s=0.01)})
    context = build_context(tmp_path, spec=spec)
    (tmp_path / "fetch" / "net.onnx").write_bytes(b"not a model")
    _, result = measured(context)
    (warm,) = result.measurements
    assert [figures.plan for figures in warm.plans] == ["prepared", "portable", "forked"]
    assert warm.skipped.keys() == {"default"}
    assert (result.decision.shipped, result.decision.faster) == ("prepared", False)
    assert len([line for line in said(context) if line.startswith("default failed")]) == 1


def test_a_prepared_model_that_cannot_be_loaded_fails_the_build(tmp_path):
    context = build_context(tmp_path)
    (tmp_path / "cpu" / "net_optimized.onnx").write_bytes(b"")
    with pytest.raises(StageError, match="prepared model failed"):
        MeasureStage().run(context)


def test_the_sample_is_that_of_the_task_that_asked_the_source():
    for targets, asked in ((("cuda", "cpu"), "cpu"), (("cuda",), "portable")):
        required = MeasureStage().requires(Plan(SPEC, targets, {}), "cuda")
        assert TaskId("verify", asked) in required
        assert len(set(required)) == len(required)


@pytest.mark.parametrize(
    ("options", "device"), [(None, "cpu"), ({}, "cuda:0"), ({"device_id": "3"}, "cuda:3")]
)
def test_the_device_that_is_locked_is_the_one_that_runs(options, device):
    gpu = () if options is None else (ProviderRecord(CUDA, options),)
    variant = Variant(
        "v",
        "cuda" if gpu else "cpu",
        "net.onnx",
        (),
        SessionOptionsRecord("ORT_DISABLE_ALL"),
        (*gpu, *PROVIDERS),
        Requirements(VersionRange("1.0"), ()),
    )
    assert device_of(variant) == device
