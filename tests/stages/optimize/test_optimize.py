"""Whatever the model, optimising ends in files that load and run, or in an error that says why not."""

import json
import resource
import shutil
import signal
import subprocess
import sys

import onnx
import pytest

from ortprep.bundle.loader_config import VersionRange
from ortprep.children.answers import write_answers
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildKilledError, LoadError, SpecError, StageError
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.stages.optimize import stage as optimize
from ortprep.stages.optimize.graph_writer import SaveRequest
from tests import builders as models
from tests.children import fakes
from tests.prepare.builders import AS_PREPARED, Project
from tests.stages.optimize.builders import Build


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def write(build, model):
    models.write_model(model, build.source / "model.onnx")


def shapes(name, *dims):
    return {"inputs": {name: {"shapes": [list(dims)]}}}


def level_of(plan):
    return None if plan is None else plan.session_options.graph_optimization_level


IMAGE = shapes("image", 2, 3, 16, 16)


def test_a_convolution_net_is_prepared_with_its_weights_in_one_mapped_file(build):
    write(build, models.conv_net(channels=32, classes=300))
    result = build.optimize(**IMAGE)
    assert result.step == "all"
    assert [attempt.outcome for attempt in result.attempts] == ["taken"]
    assert build.files() == {"net_optimized.onnx", "net_optimized.onnx.data"}
    assert result.variant.session_options.graph_optimization_level == "ORT_DISABLE_ALL"


def test_the_portable_variant_needs_nothing_of_a_machine(build):
    write(build, models.conv_net(channels=32))
    result = build.optimize("portable", **IMAGE)
    assert result.step == "basic"
    assert result.variant.session_options.graph_optimization_level == "ORT_ENABLE_ALL"
    assert result.variant.requirements.machine is None
    assert result.variant.requirements.onnxruntime == VersionRange("1.23")
    written = onnx.load(build.folder / result.variant.model, load_external_data=False)
    assert {node.domain for node in written.graph.node} == {""}


@pytest.mark.slow
def test_f11_a_source_with_operators_of_onnx_runtime_has_a_portable_variant_all_the_same(build):
    model = models.conv_net()
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Gelu", ["conv"], ["relu"], domain="com.microsoft"))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    write(build, model)
    result = build.optimize("portable", **IMAGE)
    assert result.step == "basic"
    assert result.variant.requirements.machine is None
    assert result.variant.requirements.onnxruntime.below is None
    written = onnx.load(build.folder / result.variant.model, load_external_data=False)
    assert {node.domain for node in written.graph.node} == {"", "com.microsoft"}


@pytest.fixture
def nothing_written(monkeypatch):
    """Has every session that writes a graph refused, so that the source is left."""

    def run(function, request, **options):
        if isinstance(request, SaveRequest) and request.plan is not None:
            raise LoadError("refused")
        return run_child(function, request, **options)

    monkeypatch.setattr(optimize, "run_child", run)


@pytest.mark.slow
def test_without_a_written_graph_that_holds_the_source_is_taken(build, nothing_written):
    model = models.matmul_net(size=64)
    models.write_external_model(model, build.source / "model.onnx", location="parts/weights.bin")
    result = build.optimize(**shapes("x", 2, 64))
    assert [attempt.step for attempt in result.attempts] == ["all", "extended", "basic", "source"]
    assert [attempt.outcome for attempt in result.attempts] == ["refused"] * 3 + ["taken"]
    assert result.variant.session_options.graph_optimization_level == "ORT_ENABLE_ALL"
    assert build.files() == {"net_optimized.onnx", "parts/weights.bin"}
    # Its weights are no second copy.
    assert (build.folder / "parts/weights.bin").samefile(build.source / "parts/weights.bin")
    assert len(build.said) == 3


@pytest.mark.parametrize("failure", [ChildError("child process died: SIGSEGV"), LoadError("refused")])
def test_a_step_that_fails_is_recorded_and_the_next_one_runs(build, monkeypatch, failure):
    write(build, models.zero_inputs())

    def run(function, request, **options):
        if isinstance(request, SaveRequest) and level_of(request.plan) == "ORT_ENABLE_ALL":
            (build.folder / ".attempt" / "net_optimized.onnx").touch()
            raise failure
        return run_child(function, request, **options)

    monkeypatch.setattr(optimize, "run_child", run)
    result = build.optimize()
    assert [attempt.step for attempt in result.attempts] == ["all", "extended"]
    assert result.attempts[0].outcome in str(failure)
    assert build.files() == {"net_optimized.onnx"}


@pytest.mark.slow
def test_a_portable_graph_that_full_optimisation_breaks_is_loaded_without(build, monkeypatch):
    write(build, models.zero_inputs())

    def answer(plan, samples, folder, *, timeout_s):
        if level_of(plan) == "ORT_ENABLE_ALL":
            raise LoadError("refused")
        return write_answers(plan, samples, folder, timeout_s=timeout_s)

    monkeypatch.setattr(optimize, "write_answers", answer)
    result = build.optimize("portable")
    assert [attempt.step for attempt in result.attempts] == ["basic", "basic-only"]
    assert result.variant.session_options.graph_optimization_level == "ORT_DISABLE_ALL"


@pytest.mark.slow
def test_a_step_killed_from_outside_fails_the_build_instead_of_optimising_less(build, monkeypatch):
    write(build, models.zero_inputs())

    def run(function, request, **options):
        return run_child(fakes.kill_itself, {"signal": int(signal.SIGKILL)})

    monkeypatch.setattr(optimize, "run_child", run)
    with pytest.raises(ChildKilledError, match="SIGKILL"):
        build.optimize()
    assert build.files() == set()


@pytest.mark.slow
def test_a_disk_without_room_is_an_error_and_no_reason_to_optimise_less(build):
    write(build, models.matmul_net(size=128))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StageError, match=r"no room for the optimised model .*\n  expected \d+ bytes"):
            build.optimize(inputs={"x": {"shapes": [[1, 128]]}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.slow
def test_a_file_that_does_not_load_again_is_not_taken(build, monkeypatch):
    write(build, models.zero_inputs())

    def run(function, request, **options):
        reply = run_child(function, request, **options)
        if isinstance(request, SaveRequest):
            request.model.write_bytes(request.model.read_bytes()[:40])
        return reply

    monkeypatch.setattr(optimize, "run_child", run)
    with pytest.raises(StageError) as caught:
        build.optimize(optimize={"level": "basic"})
    assert "basic, source: " in caught.value.message
    assert build.files() == set()


def test_a_source_that_onnxruntime_does_not_accept_is_told_with_its_words(build):
    write(build, models.unknown_operator())
    message = r"optimisation failed: cpu of net\n  all, .*: .*No Op registered for Frobnicate"
    with pytest.raises(StageError, match=message) as caught:
        build.optimize(**shapes("x", 2, 4))
    assert "onnxruntime/core" not in caught.value.message
    assert build.files() == set()


def test_strings_without_values_are_the_specs_error_and_no_reason_to_step_down(build):
    write(build, models.string_input())
    with pytest.raises(SpecError, match="words"):
        build.optimize(**shapes("words", 3))
    assert build.said == []


# -- what is prepared with AVX-512 and run without it: on another processor, emulated


EMULATOR = shutil.which("qemu-x86_64")
LOAD = """
import json, logging, sys
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.machine.hardware import read_hardware

warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("ortprep").addHandler(handler)
opened = open_bundle(sys.argv[1], check="golden")
level = opened.session.get_session_options().graph_optimization_level.name
print(json.dumps([opened.variant.name, level, warnings, read_hardware(gpus=False).cpu_features]))
"""


@pytest.mark.slow
@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64 (Debian package qemu-user)")
@pytest.mark.skipif(
    "avx512f" not in read_hardware(gpus=False).cpu_features, reason="prepares on a processor with AVX-512"
)
def test_on_another_processor_load_takes_the_portable_variant_and_optimises_it_there(tmp_path):
    project = Project(tmp_path)
    project.add(models.conv_net(channels=32), **IMAGE, tune=AS_PREPARED)
    assert project.run("prepare").code == 0
    assert open_bundle(project.bundle()).variant.name == "cpu"
    command = [EMULATOR, "-cpu", "Haswell", sys.executable, "-c", LOAD, str(project.bundle())]
    done = subprocess.run(command, env=project.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    variant, level, (warning,), features = json.loads(done.stdout)
    assert (variant, level) == ("portable", "ORT_ENABLE_ALL")
    assert "taking variant portable" in warning
    assert "avx512f" in warning
    assert "avx2" in features
    assert "avx512f" not in features
