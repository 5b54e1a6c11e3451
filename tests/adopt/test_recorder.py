"""What the recorder writes is what the application did, and the application notices nothing."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import onnxruntime
import pytest

from ortprep.adopt import observation
from ortprep.adopt.observation import MAX_FEEDS, InputKeeper, ModelObserver, ModelRecord, ProcessRecord
from ortprep.adopt.recorder import INPUTS_VARIABLE, RECORDS_VARIABLE, Recorder, recording_class
from ortprep.bundle.codec import decode, read_json
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime.dropin.import_hook import startup_environment
from ortprep.runtime.tensors.arrays import read_tensors
from tests.runtime.builders import add_model, operator_model, sample, weights_of, write_linear

pytestmark = pytest.mark.runtime

CPU = ["CPUExecutionProvider"]


@pytest.fixture
def model(tmp_path):
    return write_linear(tmp_path / "models" / "linear.onnx", weights_of(0))[0]


@pytest.fixture
def records(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    return folder


@pytest.fixture
def recorder(records):
    return Recorder(records)


def session_of(recorder, model, options=None, **arguments):
    kind = recording_class(onnxruntime.InferenceSession, recorder)
    return kind(model, options, **{"providers": CPU, **arguments})


def read_records(folder):
    return [decode(ProcessRecord, read_json(path)) for path in sorted(folder.glob("*.json"))]


def read_model(recorder, folder):
    recorder.write()
    [record] = read_records(folder)
    [model] = record.models
    return model


def test_answers_types_and_options_are_those_of_plain_onnxruntime(recorder, model):
    plain = onnxruntime.InferenceSession(model, providers=CPU)
    session = session_of(recorder, model)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert type(session).__name__ == "InferenceSession"
    feed = {"x": sample()}
    np.testing.assert_array_equal(session.run(None, feed)[0], plain.run(None, feed)[0])
    [value] = session.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(sample())})
    np.testing.assert_array_equal(value.numpy(), plain.run(None, feed)[0])


def test_every_way_to_run_is_recorded(recorder, records, model):
    session = session_of(recorder, model)
    rows = sample().shape[1]
    session.run(None, {"x": sample()})
    session.run(["y"], {"x": np.full((3, rows), 7, np.float32)})
    session.run_with_ort_values(None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(sample()[:1])})
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.full((4, rows), -2, np.float32))
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    found = read_model(recorder, records)
    assert (found.loads, found.runs, found.inputs) == (1, 4, {"x": "tensor(float)"})
    assert [feed.shapes.get("x") for feed in found.feeds] == [(2, rows), (3, rows), None]
    assert [feed.limits.get("x") for feed in found.feeds[1:]] == [(7.0, 7.0), None]


def test_of_a_run_with_a_value_that_cannot_be_read_no_part_is_kept(records):
    model = operator_model({"y": ("Add", ["x", "z"])}, {"x": ["n"], "z": ["n"]}, {"y": ["n"]})
    session = session_of(Recorder(records, max_inputs=4), model)
    array = np.ones(2, np.float32)
    session.run(None, {"x": array, "z": onnxruntime.OrtValue.ortvalue_from_numpy(array)})
    assert not list(records.glob("*.npz"))


def test_options_and_providers_are_those_that_differ_from_defaults(recorder, records, model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.enable_cpu_mem_arena = False
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    provider = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    session_of(recorder, model, options, providers=[provider], disabled_optimizers=["ConstantFolding"])
    found = read_model(recorder, records)
    assert found.options.attributes == {
        "intra_op_num_threads": 2,
        "enable_cpu_mem_arena": False,
        "execution_mode": "ORT_PARALLEL",
    }
    assert found.options.config_entries == {"session.intra_op.allow_spinning": "0"}
    assert found.options.graph_optimization_level == "ORT_ENABLE_EXTENDED"
    assert [(one.name, one.options) for one in found.providers] == [provider]
    assert found.obtained == ("CPUExecutionProvider",)
    assert found.obstacle == "the application passes disabled_optimizers"


def test_a_model_given_as_bytes_is_kept_once(recorder, records, tmp_path):
    text = add_model()
    for _ in range(2):
        session_of(recorder, text).run(None, {"x": [1.0, 2.0]})
    found = read_model(recorder, records)
    assert (found.path, found.size_bytes, found.loads) == (None, len(text), 2)
    assert (records / found.saved).read_bytes() == text
    assert found.feeds[0].values["x"] == (1.0, 2.0)


def test_a_failing_record_never_reaches_the_application(tmp_path, model):
    recorder = Recorder(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("no folder")
    session = session_of(recorder, model)
    assert session.run(None, {"x": sample()})[0].shape == (2, 4)


def test_what_onnxruntime_refuses_is_refused_and_not_counted(recorder, records, model):
    session = session_of(recorder, model)
    with pytest.raises(ValueError, match="x"):
        session.run(None, {"nothing": sample()})
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NoSuchFile):
        session_of(recorder, model.with_name("absent.onnx"))
    assert (read_model(recorder, records).loads, read_model(recorder, records).runs) == (1, 0)


def observe(*feeds):
    options = SessionOptionsRecord("ORT_ENABLE_ALL")
    observer = ModelObserver(ModelRecord("/m.onnx", None, 1, 1, options, (), (), None, {}))
    for feed in feeds:
        observer.add(feed)
    return observer.observed()


def test_of_many_shapes_the_first_are_told_apart_and_all_runs_counted():
    sizes = [500, 7, 7, *range(10, 200)]
    found = observe(*({"ids": np.full(size, size, np.int64)} for size in sizes))
    seen = {feed.shapes["ids"][0]: (feed.runs, feed.limits["ids"]) for feed in found.feeds}
    assert (found.runs, len(seen), seen[7]) == (len(sizes), MAX_FEEDS, (2, (7, 7)))
    assert list(seen) == [500, 7, *range(10, 8 + MAX_FEEDS)]


@pytest.mark.parametrize(
    ("array", "limits", "values"),
    [
        (np.array([3, -1, 70_000, 5, 9], np.int64), (-1, 70_000), None),
        (np.array([0.5, np.nan, np.inf, -2, 1], np.float32), (-2.0, 1.0), None),
        (np.full(9, np.nan, np.float32), None, None),
        (np.array(16_000, np.int64), (16_000, 16_000), (16_000,)),
        (np.array([True]), None, (True,)),
        (np.array(["yes", "no"], object), None, ("yes", "no")),
        (np.array(["x" * 1000], object), None, None),
        (np.zeros((1, 0), np.float32), None, None),
        (np.array([[1.5, 2.5]], np.float16), (1.5, 2.5), (1.5, 2.5)),
    ],
)
def test_limits_are_of_finite_numbers_and_values_of_small_arrays(array, limits, values):
    [feed] = observe({"x": array}).feeds
    assert (feed.limits.get("x"), feed.values.get("x")) == (limits, values)


APPLICATION = """
import multiprocessing, os, signal, sys
import numpy as np, onnxruntime

def work(runs):
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    for _ in range(runs):
        session.run(None, {"x": np.ones((1, 8), np.float32)})
    assert type(session) is onnxruntime.capi.onnxruntime_inference_collection.InferenceSession

"""
FORK = "work(1); p = multiprocessing.get_context('fork').Process(target=work, args=(5,)); p.start(); p.join()"

FORKED_SESSION = """
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"x": np.ones((1, 8), np.float32)})
for rows in (2, 3):
    if os.fork() == 0:
        for _ in range(5):
            session.run(None, {"x": np.ones((rows, 8), np.float32)})
        sys.exit()
if os.fork() == 0:
    sys.exit()  # it has the session, and does not run it
for _ in range(3):
    os.wait()
"""


def run_application(code, model, records, **variables):
    arguments = [sys.executable, "-c", APPLICATION + code, str(model), "--token", "secret"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), RECORDS_VARIABLE: str(records)}
    environment.update(variables)
    environment = startup_environment("ortprep.adopt.recorder:record_in", environment)
    return subprocess.run(arguments, timeout=60, env=environment).returncode


@pytest.mark.parametrize(
    ("code", "expected", "runs"),
    [
        ("work(5)", 0, [5]),
        ("work(5); raise SystemExit(7)", 7, [5]),
        ("work(5); os._exit(3)", 3, [4]),
        ("work(5); os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM, [4]),
        (FORK, 0, [1, 4]),
    ],
)
def test_a_process_that_ends_abruptly_leaves_out_at_most_its_last_runs(model, records, code, expected, runs):
    assert run_application(code, model, records) == expected
    found = read_records(records)
    assert not any("secret" in one.read_text() for one in records.glob("*.json"))
    assert sorted(one.models[0].runs for one in found) == runs
    assert {one.models[0].feeds[0].shapes["x"] for one in found} == {(1, 8)}


@pytest.mark.attack
def test_what_forks_run_on_their_parent_s_session_is_recorded_and_kept_apart(model, records):
    assert run_application(FORKED_SESSION, model, records, **{INPUTS_VARIABLE: "4"}) == 0
    found = [one.models[0] for one in read_records(records)]
    seen = sorted((feed.shapes["x"], one.loads, one.runs) for one in found for feed in one.feeds)
    assert seen == [((1, 8), 1, 1), ((2, 8), 0, 5), ((3, 8), 0, 5)]
    for one in found:
        shapes = {read_tensors(records / name)["x"].shape for name in one.kept}
        assert shapes == {feed.shapes["x"] for feed in one.feeds}
    assert sorted(path.name for path in records.glob("*.npz")) == sorted(
        name for one in found for name in one.kept
    )


# -- laws of the real inputs that are kept while an application runs


def feed(rows, fill=0.0):
    return {"x": np.full((rows, 4), fill, np.float32)}


def shapes_of(folder, keeper):
    return [read_tensors(folder / name)["x"].shape[0] for name in keeper.files]


def test_every_input_is_kept_while_there_is_room(tmp_path):
    keeper = InputKeeper(tmp_path, "net", 4)
    for number in range(3):
        keeper.add(feed(1, number))
    assert sorted(read_tensors(tmp_path / name)["x"][0, 0] for name in keeper.files) == [0.0, 1.0, 2.0]


@pytest.mark.attack
def test_an_input_that_cannot_be_written_leaves_the_one_before_whole(tmp_path, monkeypatch):
    def fill_the_disk(path, _):
        path.write_bytes(b"PK")
        raise OSError("the disk is full")

    keeper = InputKeeper(tmp_path, "net", 1)
    keeper.add(feed(1))
    monkeypatch.setattr(observation, "write_tensors", fill_the_disk)
    for _ in range(100):
        with suppress(OSError):
            keeper.add(feed(2))
    assert shapes_of(tmp_path, keeper) == [1]
    assert [path.name for path in tmp_path.iterdir()] == list(keeper.files)


def test_the_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "MAX_KEPT_BYTES", 100)
    keeper = InputKeeper(tmp_path, "net", 64)
    for _ in range(10):
        keeper.add(feed(2))  # 32 bytes
    assert len(keeper.files) == 3


@pytest.mark.parametrize("fed", [[[1, 2]], [[True, False]], [[1.5, 2]]])
@pytest.mark.parametrize("number", [2, 6, 9, 10, 11], ids=["uint8", "int32", "bool", "float16", "double"])
def test_lists_are_kept_as_the_arrays_that_onnxruntime_makes_of_them(records, number, fed):
    types = {"x": number, "y": number}
    model = operator_model({"y": ("Identity", ["x"])}, {"x": ["n", 2]}, {"y": ["n", 2]}, types)
    recorder = Recorder(records, max_inputs=4)
    [answer] = session_of(recorder, model).run(None, {"x": fed})
    [kept] = records.glob("*.npz")
    [array] = read_tensors(kept).values()
    assert array.dtype == answer.dtype
    np.testing.assert_array_equal(array, answer)


@pytest.mark.parametrize("value", [np.array(["a name"]), np.array([object()])])
def test_what_is_no_array_of_numbers_is_never_kept(tmp_path, value):
    keeper = InputKeeper(tmp_path, "net", 4)
    keeper.add({"x": np.zeros((1, 4), np.float32), "name": value})
    assert keeper.files == ()
    assert not list(tmp_path.iterdir())
