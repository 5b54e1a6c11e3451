"""Probes of loads, and checks of variants, in child processes."""

import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

import ortprep.children
from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import FirstPhase, read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.children.variant_check import check_variants
from ortprep.errors import ChildTimeoutError, LoadError
from ortprep.runtime.loading.session import default_plan
from ortprep.runtime.loading.variant_selection import PassedOver
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import (
    CPU_ONLY,
    UNMET,
    rewrite_digests,
    sample,
    weights_of,
    write_bundle,
    write_linear,
)


@pytest.fixture
def inputs(tmp_path):
    write_tensors(tmp_path / "0.npz", {"x": sample()})
    return str(tmp_path / "0.npz")


def assert_figures(result):
    assert result.init_ms > 0
    assert result.first_ms > 0
    assert result.steady_ms > 0
    assert result.runs >= 5
    assert 1 < result.private_mb <= result.peak_mb
    # What is left is the interpreter's start: nobody imports numpy in it.
    assert result.ready_ms > result.init_ms + result.first_ms
    assert result.gpu_mb is None


@pytest.mark.runtime
def test_a_plan_is_measured(tmp_path, inputs):
    model, data = write_linear(tmp_path / "m.onnx", weights_of(0))
    files = (str(model), str(data))
    request = ProbeRequest(default_plan(str(model)), inputs, steady_s=0.01, drop_cache=files)
    result = measure_plan(request, timeout_s=600)
    assert_figures(result)


@pytest.mark.runtime
def test_a_bundle_is_measured_through_load(tmp_path, inputs):
    bundle = write_bundle(tmp_path / "b")
    assert_figures(measure_plan(ProbeRequest(None, inputs, 0.01, bundle=str(bundle)), timeout_s=600))


def modules_after(code):
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


@pytest.mark.runtime
@pytest.mark.parametrize("kind", JOBS)
def test_a_measured_process_has_imported_what_a_job_has_once_its_session_is_there(tmp_path, kind):
    model, _ = write_linear(tmp_path / "m.onnx", weights_of(0))
    bundle = write_bundle(tmp_path / "b")
    plan, path = encode(default_plan(str(model))), str(bundle) if kind == "bundle" else None
    request = {"plan": plan, "bundle": path, "forked": False}
    measured = f"names = {{'__name__': 'probe'}}\nexec(open({str(SCRIPT)!r}).read(), names)"
    assert modules_after(measured) - modules_after("") <= {"time", "marshal"}
    session = f"{measured}\nassert 'session' in names['start']({request!r})"
    job = JOBS[kind].format(model=str(model), bundle=str(bundle))
    time.sleep(0.05)  # what changed just now is not remembered
    modules_after(job)
    assert modules_after(session) - {"time", "marshal"} == modules_after(job) - {"time", "marshal"}


@pytest.mark.runtime
def test_a_fork_is_measured_from_the_fork_on(tmp_path, inputs):
    bundle = str(write_bundle(tmp_path / "b"))
    alone = measure_plan(ProbeRequest(None, inputs, 0.01, bundle=bundle), timeout_s=600)
    fork = measure_plan(ProbeRequest(None, inputs, 0.01, bundle=bundle, forked=True), timeout_s=600)
    assert 0 < fork.ready_ms < alone.ready_ms / 2
    assert fork.start_ms == pytest.approx(0, abs=0.01)
    assert 0 < fork.private_mb < alone.private_mb / 2
    assert fork.runs >= 5


@pytest.mark.runtime
@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_process_ends_as_the_fork_that_it_waits_for(end):
    lines = "import os, signal\nfrom ortprep.children.probe_process import enter_fork\n"
    ran = subprocess.run([sys.executable, "-c", f"{lines}enter_fork()\n{end}"], check=False)
    assert ran.returncode == (7 if "exit" in end else -signal.SIGSEGV)


@pytest.mark.runtime
def test_a_plan_that_cannot_be_loaded_arrives_as_the_load_error_it_is(tmp_path, inputs):
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(LoadError, match="cannot load"):
        measure_plan(ProbeRequest(default_plan(str(tmp_path / "m.onnx")), inputs, 0.01), timeout_s=600)


# -- every variant that a machine can run is loaded and asked, not the preferred one alone


@pytest.mark.runtime
def test_each_variant_is_answered_for_by_itself(tmp_path):
    needs = {"cpu": UNMET, "portable": CPU_ONLY, "spare": CPU_ONLY}
    checked = list(check_variants(write_bundle(tmp_path / "b", requirements=needs)))
    assert [found.name for found in checked] == ["cpu", "portable", "spare"]
    assert [bool(found.reasons) for found in checked] == [True, False, False]
    assert "expected ONNX Runtime >= 99.0" in str(checked[0])


@pytest.mark.runtime
def test_a_variant_that_no_job_here_would_take_fails_too(tmp_path):
    bundle = write_bundle(tmp_path / "b", requirements={"cpu": CPU_ONLY, "portable": CPU_ONLY})
    write_linear(bundle / "portable" / "linear_optimized.onnx", np.ones((8, 4), np.float32))
    rewrite_digests(bundle)
    found = check_variants(bundle)
    assert next(found) == PassedOver("cpu", ())
    with pytest.raises(LoadError, match=r"'portable' of .* does not answer as recorded"):
        next(found)


@pytest.mark.runtime
def test_a_first_phase_has_to_answer_too(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    config = read_loader_config(bundle)
    first = FirstPhase(SessionOptionsRecord("NO_SUCH_LEVEL"), config.variants[0].providers)
    variants = (config.variants[0]._replace(first_phase=first),)
    write_loader_config(bundle, config._replace(variants=variants))
    with pytest.raises(LoadError, match="NO_SUCH_LEVEL"):
        list(check_variants(bundle))


@pytest.mark.attack
def test_a_bundle_that_runs_without_end_is_checked_for_a_time(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    assert signature(check_variants).parameters["timeout_s"].default == 600.0
    with pytest.raises(ChildTimeoutError):
        list(check_variants(bundle, timeout_s=0.01))
