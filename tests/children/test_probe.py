from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import ortprep.children
from ortprep.bundle.codec import encode
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.errors import ChildError, LoadError
from ortprep.runtime.loading.session import default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import sample, weights_of, write_bundle, write_linear

pytestmark = pytest.mark.runtime


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    write_tensors(tmp_path / "0.npz", {"x": sample()})
    return str(tmp_path / "0.npz")


def assert_figures(result: ProbeResult) -> None:
    import onnxruntime

    assert result.onnxruntime == onnxruntime.__version__
    assert result.init_ms > 0
    assert result.first_ms > 0
    assert result.steady_ms > 0
    assert result.runs >= 5
    assert 1 < result.private_mb <= result.peak_mb
    assert result.import_ms > 0
    # What is left is the interpreter's start: nobody imports numpy in it.
    assert result.ready_ms > result.import_ms + result.init_ms + result.first_ms
    assert result.gpu_mb is None


def test_a_plan_is_measured(tmp_path: Path, inputs: str) -> None:
    model, data = write_linear(tmp_path / "m.onnx", weights_of(0))
    files = (str(model), str(data))
    request = ProbeRequest(default_plan(str(model)), inputs, steady_s=0.01, drop_cache=files)
    result = measure_plan(request, timeout_s=600)
    assert_figures(result)


def test_a_bundle_is_measured_through_load(tmp_path: Path, inputs: str) -> None:
    bundle = write_bundle(tmp_path / "b")
    assert_figures(measure_plan(ProbeRequest(None, inputs, 0.01, bundle=str(bundle)), timeout_s=600))


def modules_after(code: str) -> set[str]:
    """Returns what is imported in a fresh interpreter once it has run some lines."""
    lines = f"import sys\n{code}\nprint('modules', *sys.modules)"
    command = [sys.executable, "-P", "-c", lines]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ran.stdout.rpartition("modules ")[2].split())


SCRIPT = Path(ortprep.children.__file__).with_name("probe_script.py")
JOBS = {
    "plan": "import onnxruntime\nonnxruntime.InferenceSession({model!r})",
    "bundle": "import onnxruntime\nfrom ortprep.runtime import load\nload({bundle!r})",
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_measured_process_has_imported_what_a_job_has_once_its_session_is_there(
    tmp_path: Path, kind: str
) -> None:
    model, _ = write_linear(tmp_path / "m.onnx", weights_of(0))
    bundle = write_bundle(tmp_path / "b")
    plan, path = encode(default_plan(str(model))), str(bundle) if kind == "bundle" else None
    request = {"plan": plan, "bundle": path, "target": None}
    measured = f"names = {{'__name__': 'probe'}}\nexec(open({str(SCRIPT)!r}).read(), names)"
    assert modules_after(measured) - modules_after("") <= {"time", "marshal"}
    session = f"{measured}\nassert 'session' in names['start']({request!r})"
    job = JOBS[kind].format(model=str(model), bundle=str(bundle))
    time.sleep(0.05)  # what changed just now is not remembered
    modules_after(job)
    assert modules_after(session) - {"time", "marshal"} == modules_after(job) - {"time", "marshal"}


def test_at_least_five_runs_are_measured_however_short_the_time(tmp_path: Path, inputs: str) -> None:
    model, _ = write_linear(tmp_path / "m.onnx", weights_of(0))
    result = measure_plan(ProbeRequest(default_plan(str(model)), inputs, steady_s=1e-9), timeout_s=600)
    assert result.runs == 5


def test_a_plan_that_cannot_be_loaded_arrives_as_the_load_error_it_is(tmp_path: Path, inputs: str) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(LoadError, match="cannot load"):
        measure_plan(ProbeRequest(default_plan(str(tmp_path / "m.onnx")), inputs, 0.01), timeout_s=600)


def test_a_request_for_nothing_is_an_error(inputs: str) -> None:
    with pytest.raises(ChildError, match="nothing to measure"):
        measure_plan(ProbeRequest(None, inputs, 0.01), timeout_s=600)
