"""`session` makes a bundle's session where that is the same model, and a plain one wherever it is not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest

import ortprep
from ortprep.bundle.file_memory import find_stamp
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime import wait_steady
from ortprep.runtime.dropin import source_index
from ortprep.runtime.dropin.session import bundle_session_class
from ortprep.runtime.dropin.source_index import is_source, list_bundles
from ortprep.runtime.loading import forking
from ortprep.runtime.loading.phases import STEADY, SteadyBuild, may_swap
from tests.runtime.builders import (
    CUDA_NEEDED,
    UNMET,
    Part,
    add_model,
    operator_model,
    sample,
    weights_of,
    write_bundle,
    write_converted,
)
from tests.runtime.dropin.builders import (
    BUNDLE_SEED,
    SOURCE_SEED,
    is_of_bundle,
    rewritten,
    run_python,
    write_bundle_of,
    write_source,
)

pytestmark = pytest.mark.runtime

CPU = ["CPUExecutionProvider"]


@pytest.fixture
def model(tmp_path):
    return write_source(tmp_path / "application/linear.onnx")


@pytest.fixture
def bundle(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_BUNDLES", str(tmp_path / "bundles"))
    return write_bundle_of(model, tmp_path / "bundles/linear")


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.INFO, logger="ortprep")
    return caplog


def reasons(said):
    """Returns why sessions were plain."""
    return [record.getMessage() for record in said.records if "plain session of" in record.getMessage()]


def test_a_path_of_the_same_model_gives_the_bundles_session(model, bundle, monkeypatch, said):
    for named in (str, Path):
        session = ortprep.session(named(model), providers=CPU, enable_fallback=0)
        assert is_of_bundle(session)
        assert isinstance(session, onnxruntime.InferenceSession)
    assert reasons(said) == []
    assert not is_of_bundle(ortprep.session(model, disabled_optimizers=["ConstantFolding"]))
    for places in ("", "/no/such/folder"):
        said.clear()
        monkeypatch.setenv("ORTPREP_BUNDLES", places)
        assert not is_of_bundle(ortprep.session(model))
        assert len(reasons(said)) == 1


def test_the_bytes_of_the_same_model_give_the_bundles_session(tmp_path, bundle):
    model = tmp_path / "inline.onnx"
    model.write_bytes(add_model())
    write_bundle_of(model, tmp_path / "bundles/inline", inline=True)
    session = ortprep.session(model.read_bytes(), None, CPU)
    assert is_of_bundle(session)
    other = operator_model({"y": ("Mul", ("x", "x"))}, {"x": (2,)}, {"y": (2,)})
    assert len(other) == len(add_model())
    (answer,) = ortprep.session(other, None, CPU).run(None, {"x": np.full(2, 3, np.float32)})
    assert answer.tolist() == [9, 9]


@pytest.mark.attack
def test_a_bundle_that_was_another_when_it_was_listed_is_not_used(model, tmp_path, bundle, monkeypatch):
    """As somebody would try who may write to the folder of bundles, and has another model's, signed."""
    other = write_bundle_of(write_source(tmp_path / "other/linear.onnx", seed=2), tmp_path / "signed")
    listed, place = source_index._read_source, tmp_path / "forged"

    def swap(left, right):
        left.rename(place)
        right.rename(left)
        place.rename(right)

    def read(*arguments):
        source = listed(*arguments)
        swap(bundle, other)
        return source

    monkeypatch.setattr(source_index, "_read_source", read)
    monkeypatch.setattr(source_index, "find_stamp", lambda _path: find_stamp(other / "loader.json"))
    assert not is_of_bundle(ortprep.session(model, providers=CPU))


def test_bundles_that_come_and_go_are_noticed(model, tmp_path, bundle):
    assert is_of_bundle(ortprep.session(model))
    shutil.rmtree(bundle)
    assert not is_of_bundle(ortprep.session(model))
    write_bundle_of(model, tmp_path / "bundles/another")
    assert is_of_bundle(ortprep.session(model))


@pytest.mark.usefixtures("bundle")
def test_f26_an_upgrade_of_the_model_is_served_plainly(model, said):
    assert is_of_bundle(ortprep.session(model))
    data = bytearray(model.read_bytes())
    data[data.index(b"graph")] ^= 1  # the graph's name: the same size, the same answers
    model.write_bytes(data)
    assert not is_of_bundle(ortprep.session(model))
    (reason,) = reasons(said)
    assert "no bundle was prepared from these bytes" in reason


def test_f26_other_weights_beside_the_same_graph_are_served_plainly(model, bundle):
    write_source(model.with_name("other.onnx"), seed=1)
    weights = model.with_name(model.name + ".data")
    array = np.frombuffer(weights.read_bytes(), np.float32).copy()
    array[0] += 100
    (listed,) = list_bundles(str(bundle.parent))
    assert is_source(listed, str(model))
    for other in (weights.read_bytes()[:-1], array.tobytes()):
        weights.write_bytes(other)
        assert not is_source(listed, str(model))
    (answer,) = ortprep.session(model).run(None, {"x": sample()})
    assert answer[0, 0] == pytest.approx((sample() @ array.reshape(8, 4))[0, 0], rel=1e-4)


@pytest.mark.attack
@pytest.mark.parametrize(
    "place",
    ["https://user:tok3n@host/x/net@v1", "oci://host/net?sig=tok3n", "registry://net#tok3n", "net@v1"],
)
def test_a_registry_is_no_place_of_bundles_and_no_log_line_has_its_credentials(
    model, bundle, monkeypatch, place, said
):
    monkeypatch.setenv("ORTPREP_BUNDLES", f"{bundle}:{place}" if "://" in place else place)
    assert not is_of_bundle(ortprep.session(model))
    assert {record.levelno for record in said.records} == {logging.INFO, logging.WARNING}
    assert "ortprep pull" in said.text
    assert "tok3n" not in said.text


def test_f26_a_bundle_without_its_source_is_never_used(model, bundle, said):
    write_bundle(bundle)
    assert not is_of_bundle(ortprep.session(model))
    assert len(reasons(said)) == 1


@pytest.mark.usefixtures("bundle")
def test_the_application_keeps_its_own_session_options(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_cpu_mem_arena, options.logid = 3, False, "mine"
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("mine.of_no_table", "7")
    for _ in range(2):
        session = ortprep.session(model, options, CPU)
        assert is_of_bundle(session)
        used = session.get_session_options()
        assert (used.intra_op_num_threads, used.enable_cpu_mem_arena, used.logid) == (3, False, "mine")
        assert used.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert used.get_session_config_entry("mine.of_no_table") == "7"
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def set_level(options):
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def set_weights(options):
    weights = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((8, 4), np.float32))
    options.add_initializer("w", weights)
    KEPT.append(weights)


KEPT = []
"""ONNX Runtime does not keep what is added as initializer."""

OBSTACLES = {
    "ORT_DISABLE_ALL": set_level,
    "add_initializer": set_weights,
    "add_free_dimension_override_by_name": lambda o: o.add_free_dimension_override_by_name("batch", 2),
    "saves": lambda o: setattr(o, "optimized_model_filepath", os.devnull),
    "optimization.disable_specified_optimizers": lambda o: o.add_session_config_entry(
        "optimization.disable_specified_optimizers", "ConstantFolding"
    ),
}


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("name", OBSTACLES)
def test_what_an_optimised_graph_cannot_give_makes_a_plain_session(model, name, said):
    options = onnxruntime.SessionOptions()
    OBSTACLES[name](options)
    (answer,) = ortprep.session(model, options, CPU).run(None, {"x": sample()})
    (expected,) = onnxruntime.InferenceSession(model, options, CPU).run(None, {"x": sample()})
    assert np.array_equal(answer, expected)
    (reason,) = reasons(said)
    assert name in reason


class Registered(bundle_session_class()):
    """A session class of an application that has its classes registered."""

    registered: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind, **others):
        super().__init_subclass__(**others)
        cls.registered.append(kind)


class Detector(Registered, kind="detector"):
    """A session that can be pickled, with methods of all kinds beside ONNX Runtime's."""

    reply: Any = dict

    def __init__(self, path):
        super().__init__(path, providers=CPU)
        self.path = path

    def __getstate__(self):
        return self.path

    def __setstate__(self, path):
        self.__init__(path)

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def name_of(cls):
        return cls.__name__

    def run(self, names, feed, options=None):
        return super().run(names, {"x": self.twice(feed["x"])}, options)

    async def detect(self, x):
        return self.reply(y=self.run(None, {"x": x})[0])


@pytest.mark.attack
@pytest.mark.parametrize("serving", ["phases", "forks"])
def test_an_applications_own_class_stays_as_it_is(model, bundle, monkeypatch, serving):
    monkeypatch.setattr(forking, "has_telemetry_thread", lambda: False)
    monkeypatch.setenv("ORTPREP_FORK", "1" if serving == "forks" else "")
    first = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
    if serving == "phases":
        write_bundle_of(model, bundle, first=first)
    session = Detector(model)
    attribute = {"phases": STEADY, "forks": "_ortprep_forks"}[serving]
    assert getattr(session, attribute, None) is not None or (serving == "phases" and not may_swap())
    assert type(session) is Detector
    assert Registered.registered == ["detector"]
    assert session.name_of() == "Detector"
    assert asyncio.iscoroutinefunction(session.detect)
    for served in (session, pickle.loads(pickle.dumps(session))):
        wait_steady(served, 300)
        feed = np.ones((4, 8), np.float32)
        expected = 2 * feed @ weights_of(BUNDLE_SEED)
        np.testing.assert_allclose(asyncio.run(served.detect(feed))["y"], expected, atol=1e-4)


@pytest.mark.attack
@pytest.mark.skipif(not may_swap(), reason="one phase")
def test_an_applications_own_methods_wait_for_no_steady_session(model, bundle, monkeypatch):
    write_bundle_of(model, bundle, first=SessionOptionsRecord("ORT_DISABLE_ALL"))
    monkeypatch.setattr(SteadyBuild, "wait", lambda *_: pytest.fail("waited"))
    monkeypatch.setattr(SteadyBuild, "start", lambda _: None)
    session = Detector(model)
    assert asyncio.run(session.detect(sample()))["y"].shape == (2, 4)
    with pytest.raises(pytest.fail.Exception, match="waited"):
        session.io_binding()


@pytest.mark.attack
def test_a_run_that_the_application_put_in_place_before_sees_every_batch(model, bundle, monkeypatch):
    class Twice(onnxruntime.InferenceSession):
        def run(self, names, feed, options=None):
            return super().run(names, {"x": 2 * feed["x"]}, options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Twice)
    feed = np.ones((4, 8), np.float32)
    (answer,) = bundle_session_class.__wrapped__()(model, providers=CPU).run(None, {"x": feed})
    np.testing.assert_allclose(answer, 2 * feed @ weights_of(BUNDLE_SEED), atol=1e-4)


@pytest.mark.parametrize("odd", ["a\0b", bytearray(5_000_000), 3])
def test_what_is_no_model_gets_onnxruntimes_own_error_and_a_short_line(bundle, said, odd):
    with pytest.raises(Exception) as plain:
        onnxruntime.InferenceSession(odd)
    with pytest.raises(type(plain.value)):
        ortprep.session(odd)
    assert len(said.text) < 500


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    "providers",
    [None, [], CPU, ("CPUExecutionProvider",), [("CPUExecutionProvider", {"arena_extend_strategy": "x"})]],
)
def test_a_bundle_for_the_cpu_serves_whoever_would_get_the_cpu(model, providers):
    session = ortprep.session(model, providers=providers)
    assert is_of_bundle(session)
    assert session.get_providers() == CPU


@pytest.mark.parametrize("requirements", [{"cpu": UNMET}, {"cuda": CUDA_NEEDED}])
def test_a_bundle_for_other_machines_makes_a_plain_session_without_a_warning(
    model, bundle, requirements, said
):
    with rewritten(bundle):
        write_bundle(bundle, requirements=requirements)
    assert not is_of_bundle(ortprep.session(model, providers=CPU))
    assert len(reasons(said)) == 1
    assert {record.levelno for record in said.records} == {logging.INFO}


@pytest.mark.parametrize("precisions", [("int8",), ("int8", "fp32")])
def test_a_variant_of_reduced_precision_never_stands_for_its_source(model, bundle, precisions, said):
    seeds = {"int8": SOURCE_SEED + 1, "fp32": BUNDLE_SEED}
    with rewritten(bundle):
        write_converted(bundle, [Part(f"cpu-{one}", seed=seeds[one], precision=one) for one in precisions])
    assert is_of_bundle(ortprep.session(model, providers=CPU)) == ("fp32" in precisions)
    assert [("precision 'fp32'" in reason) for reason in reasons(said)] == [True] * ("fp32" not in precisions)


@pytest.mark.parametrize("switched_off", [False, True])
def test_f27_a_judged_variant_stands_for_its_source_until_that_is_switched_off(
    model, bundle, switched_off, monkeypatch
):
    parts = [Part("cpu-int8", seed=BUNDLE_SEED, precision="int8"), Part("cpu", seed=SOURCE_SEED)]
    with rewritten(bundle, judged=lambda one: one.precision == "int8"):
        write_converted(bundle, parts)
    if switched_off:
        monkeypatch.setenv("ORTPREP_PRECISION", "fp32")
    assert is_of_bundle(ortprep.session(model, providers=CPU)) != switched_off


def test_a_damaged_bundle_is_a_warning_and_a_plain_session(model, bundle, said):
    weights = bundle / "cpu/linear_optimized.onnx.data"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    assert not is_of_bundle(ortprep.session(model, providers=CPU))
    (warning,) = (record.getMessage() for record in said.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"cannot use {bundle}: bundle is not as it was written")
    assert warning.endswith(f"(hint: ortprep check {bundle})")
    assert not any("\n" in message for message in said.messages)


# -- bundles are found by what they were prepared from


def test_a_source_is_found_in_json_of_any_form_and_soon_in_what_a_build_wrote(tmp_path):
    for name in ("one", "two\ttabs"):
        written = write_bundle_of(write_source(tmp_path / "net.onnx"), tmp_path / "bundles" / name)
    code = (
        "import sys; from ortprep.runtime.dropin.source_index import list_bundles\n"
        "print(len(list_bundles(sys.argv[1])), 'ortprep.bundle.loader_config' in sys.modules)"
    )
    assert run_python(code, tmp_path / "bundles").stdout.strip() == "2 False"
    config = written / "loader.json"
    config.write_text(json.dumps(json.loads(config.read_text())))
    assert run_python(code, tmp_path / "bundles").stdout.strip() == "2 True"


def test_a_damaged_bundle_is_read_once_until_it_is_written_again(tmp_path, own_cache, caplog):
    for name in ("net", "empty"):
        (tmp_path / "bundles" / name).mkdir(parents=True)
    (tmp_path / "bundles/file.txt").touch()
    (tmp_path / "bundles/net/loader.json").write_text("{}")
    for _ in range(3):
        assert list_bundles(str(tmp_path / "bundles")) == []
    (message,) = caplog.messages
    assert message.startswith(f"cannot use {tmp_path}/bundles/net: ")
    assert "\n" not in message
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []
    write_bundle_of(write_source(tmp_path / "net.onnx"), tmp_path / "bundles/net")
    assert len(list_bundles(str(tmp_path / "bundles"))) == 1
