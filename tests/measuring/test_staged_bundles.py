from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import Requirements, TensorSpec, Variant
from ortprep.bundle.session_record import SessionOptionsRecord, SessionPlan
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.errors import BundleError, LoadError
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.runtime import load, open_bundle
from ortprep.runtime.loading.session import default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import COLUMNS, CPU_ONLY, ROWS, UNMET, sample, weights_of, write_linear

pytestmark = pytest.mark.runtime

INPUTS = (TensorSpec("x", "float32", ("batch", ROWS)),)
OUTPUTS = (TensorSpec("y", "float32", ("batch", COLUMNS)),)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "m").mkdir()
    model, _ = write_linear(tmp_path / "m" / "m.onnx", weights_of(0))
    return default_plan(str(model), level="ORT_DISABLE_ALL")


@pytest.fixture
def staged(tmp_path, cache):
    return StagedBundles(tmp_path / "staged", INPUTS, OUTPUTS)


def stage(staged: StagedBundles, plan: SessionPlan, needs: Requirements = CPU_ONLY) -> Path:
    model = Path(plan.model)
    variant = Variant("v", "cpu", model.name, (), plan.session_options, plan.providers, needs)
    return staged.stage(model.parent, variant, timeout_s=600)


def with_threads(plan: SessionPlan, count: int) -> SessionPlan:
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": count})
    return plan._replace(session_options=options)


def test_a_staged_bundle_loads_as_the_plan_says_and_takes_no_second_copy(staged, plan):
    opened = open_bundle(stage(staged, plan))
    (answer,) = opened.session.run(None, {"x": sample()})
    np.testing.assert_allclose(answer, sample() @ weights_of(0), rtol=1e-4)
    assert opened.plan.session_options == plan.session_options
    assert Path(opened.plan.model).samefile(plan.model)


def test_every_plan_of_a_model_has_a_bundle_of_its_own(staged, plan):
    wanted = [with_threads(plan, count) for count in (1, 2, 1)]
    bundles = [stage(staged, one) for one in wanted]
    assert bundles[0] == bundles[2] != bundles[1]
    for bundle, one in zip(bundles, wanted, strict=True):
        assert open_bundle(bundle).plan.session_options == one.session_options


def test_what_load_remembers_is_there_before_it_is_measured(staged, plan, cache):
    for count in (1, 2, 1):
        bundle = stage(staged, with_threads(plan, count))
        before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
        assert before
        code = f"from ortprep.runtime import load; load({str(bundle)!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_plan_is_measured_through_load_of_its_bundle(tmp_path, staged, plan):
    write_tensors(tmp_path / "0.npz", {"x": sample()})
    bundle = stage(staged, plan)
    request = ProbeRequest(plan, str(tmp_path / "0.npz"), 0.01, bundle=str(bundle))
    result = measure_plan(request, timeout_s=600)
    assert result.ready_ms > result.import_ms + result.init_ms + result.first_ms
    (bundle / "loader.json").write_bytes(b"{}")
    with pytest.raises(BundleError):
        measure_plan(request, timeout_s=600)


def test_a_plan_this_machine_does_not_meet_is_an_error_as_it_is_for_a_job(staged, plan):
    with pytest.raises(LoadError, match="no variant of staged"):
        stage(staged, plan, UNMET)
    load(stage(staged, plan))
