"""Sessions are made as their plan says, or not at all."""

import itertools
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.errors import LoadError, LoadTimeoutError
from ortprep.runtime.loading import session as session_module
from ortprep.runtime.loading.session import CPU, CUDA, build_session, default_plan, with_device
from ortprep.runtime.machine.hardware import read_gpus
from tests.fakes import Interruption, wait_for
from tests.runtime.builders import sample, weights_of, write_linear

pytestmark = pytest.mark.runtime


@pytest.fixture
def model(tmp_path):
    return str(write_linear(tmp_path / "linear.onnx", weights_of(0))[0])


def test_the_default_plan_is_what_plain_onnxruntime_does(model):
    import onnxruntime

    ours = build_session(default_plan(model))
    plain = onnxruntime.InferenceSession(model, providers=[CPU])
    assert type(ours) is type(plain)
    assert ours.get_providers() == plain.get_providers()
    options, defaults = ours.get_session_options(), plain.get_session_options()
    assert options.graph_optimization_level == defaults.graph_optimization_level
    np.testing.assert_array_equal(ours.run(None, {"x": sample()})[0], plain.run(None, {"x": sample()})[0])


def test_f14_recorded_options_reach_the_session(model):
    import onnxruntime

    record = SessionOptionsRecord(
        "ORT_DISABLE_ALL",
        {"intra_op_num_threads": 1, "execution_mode": "ORT_PARALLEL", "enable_mem_pattern": False},
        {"session.disable_prepacking": "1"},
    )
    options = build_session(SessionPlan(model, record, (ProviderRecord(CPU),))).get_session_options()
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.intra_op_num_threads == 1
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.enable_mem_pattern is False
    assert options.get_session_config_entry("session.disable_prepacking") == "1"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"warp_drive": 1}, r"unknown session option(?s:.)*got 'warp_drive'"),
        ({"register_custom_ops_library": "x.so"}, "unknown session option"),
        ({"intra_op_num_threads": "many"}, "bad session option"),
        ({"execution_mode": "SIDEWAYS"}, "no ExecutionMode named 'SIDEWAYS'"),
        ({"level": "ORT_ENABLE_MAGIC"}, "no GraphOptimizationLevel named 'ORT_ENABLE_MAGIC'"),
    ],
)
def test_an_option_that_cannot_be_set_is_an_error(model, attributes, message):
    level = attributes.get("level", "ORT_ENABLE_ALL")
    attributes = {name: value for name, value in attributes.items() if name != "level"}
    with pytest.raises(LoadError, match=message):
        build_session(default_plan(model, level=level, attributes=attributes))


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a model"])
def test_a_file_that_is_no_model_is_an_error_that_names_it(tmp_path, content):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(content)
    with pytest.raises(LoadError, match=r"cannot load .*broken\.onnx"):
        build_session(default_plan(str(broken)))


@pytest.mark.skipif(bool(read_gpus()), reason="this machine has a GPU")
def test_asking_for_cuda_never_gives_a_cpu_session(model, capfd):
    with pytest.raises(LoadError, match=CUDA) as caught:
        build_session(default_plan(model, CUDA))
    assert "[cuda]" in str(caught.value)
    assert capfd.readouterr().out == ""


class Workshop:
    """Stands in for ONNX Runtime's sessions: says how many are being made at once, and makes them slowly."""

    def __init__(self, monkeypatch):
        self.most = self.now = 0
        self.count = threading.Lock()
        self.meeting = None
        self.may_end = threading.Event()
        self.may_end.set()
        monkeypatch.setattr(session_module, "plain_session_class", lambda: self.make)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr(session_module, "_preload_cuda", lambda: None)

    def make(self, model, options, *, providers, enable_fallback):
        del model, options, enable_fallback
        with self.count:
            self.now += 1
            self.most = max(self.most, self.now)
        if self.meeting is not None:
            self.meeting.wait(timeout=300)
        time.sleep(0.05)
        assert self.may_end.wait(300)
        with self.count:
            self.now -= 1
        return types.SimpleNamespace(get_providers=lambda: [name for name, _ in providers])

    @staticmethod
    def build_at_once(*plans):
        with ThreadPoolExecutor(len(plans)) as threads:
            return list(threads.map(build_session, plans))


@pytest.fixture
def workshop(monkeypatch):
    return Workshop(monkeypatch)


FIRST_GPU = default_plan("m", CUDA)


@pytest.mark.parametrize(
    "plans",
    [[default_plan("m")] * 3, [with_device(FIRST_GPU, 1)] * 3, [FIRST_GPU, with_device(FIRST_GPU, 0)]],
    ids=["cpu", "gpu", "the first gpu is meant by none"],
)
def test_one_session_at_a_time_is_made_on_a_device(workshop, plans):
    assert len(workshop.build_at_once(*plans)) == len(plans)
    assert workshop.most == 1


def test_waiting_for_a_device_is_part_of_the_deadline(workshop):
    workshop.may_end.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(build_session, default_plan("first"))
        wait_for(lambda: workshop.now, what="the first session is being made")
        with pytest.raises(LoadTimeoutError, match=r"second\n  expected a session within 0.1 s"):
            build_session(default_plan("second"), timeout_s=0.1)
        workshop.may_end.set()
    assert first.result()


@pytest.mark.attack
@pytest.mark.parametrize("timeout_s", [None, 300])
def test_a_load_that_a_signal_interrupts_anywhere_leaves_its_device_free(timeout_s):
    def create(*_, **__):
        return types.SimpleNamespace(get_providers=lambda: [CPU])

    plan, kept = default_plan("m"), []
    build_session(plan, create=create, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as threads:
        for moment in itertools.count():
            sys.setprofile(Interruption(moment))
            try:
                build_session(plan, create=create, timeout_s=timeout_s)
                break
            except KeyboardInterrupt as error:
                kept.append(error)  # as a notebook does, with its frames
            finally:
                sys.setprofile(None)
            assert threads.submit(build_session, plan, create=create, timeout_s=10).result()
    assert len(kept) > 20
