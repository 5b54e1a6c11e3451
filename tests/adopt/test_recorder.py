"""What the recorder writes is what the application did, and the application notices nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortprep.adopt.recorder import RECORDS_VARIABLE, Recorder, binding_class, recording_class
from ortprep.bundle.codec import decode, read_json
from ortprep.runtime.dropin.import_hook import startup_environment
from ortprep.runtime.dropin.observation import MAX_FEEDS, FeedObserver, ModelRecord, ProcessRecord
from ortprep.runtime.dropin.session_request import SessionRequest
from tests.runtime.builders import add_model, sample, weights_of, write_linear

pytestmark = pytest.mark.runtime

CPU = ["CPUExecutionProvider"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_linear(tmp_path / "models" / "linear.onnx", weights_of(0))[0]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "records"
    folder.mkdir()
    return folder


@pytest.fixture
def recorder(records: Path) -> Recorder:
    return Recorder(records)


def session_of(recorder: Recorder, model: Any, options: Any = None, **arguments: Any) -> Any:
    kind = recording_class(onnxruntime.InferenceSession, recorder)
    return kind(model, options, **{"providers": CPU, **arguments})


def read_records(folder: Path) -> list[ProcessRecord]:
    return [decode(ProcessRecord, read_json(path)) for path in sorted(folder.glob("*.json"))]


def read_model(recorder: Recorder, folder: Path) -> ModelRecord:
    recorder.write()
    [record] = read_records(folder)
    [model] = record.models
    return model


def test_answers_types_and_options_are_those_of_plain_onnxruntime(recorder: Recorder, model: Path) -> None:
    plain = onnxruntime.InferenceSession(model, providers=CPU)
    session = session_of(recorder, model)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert type(session).__name__ == "InferenceSession"
    feed = {"x": sample()}
    np.testing.assert_array_equal(session.run(None, feed)[0], plain.run(None, feed)[0])
    [value] = session.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(sample())})
    np.testing.assert_array_equal(value.numpy(), plain.run(None, feed)[0])


def test_every_way_to_run_is_recorded(recorder: Recorder, records: Path, model: Path) -> None:
    session = session_of(recorder, model)
    rows = sample().shape[1]
    session.run(None, {"x": sample()})
    session.run(["y"], {"x": np.full((3, rows), 7, np.float32)})
    session.run_with_ort_values(None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(sample()[:1])})
    binding = binding_class(onnxruntime.IOBinding)(session)
    binding.bind_cpu_input("x", np.full((4, rows), -2, np.float32))
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    found = read_model(recorder, records)
    assert (found.loads, found.runs, found.inputs) == (1, 4, {"x": "tensor(float)"})
    seen = {feed.inputs["x"].shape: feed.inputs["x"] for feed in found.feeds}
    assert list(seen) == [(2, rows), (3, rows), (1, rows), (4, rows)]
    assert [(one.minimum, one.maximum) for one in seen.values()] == [
        (-1.0, 1.0),
        (7.0, 7.0),
        (-1.0, sample()[0].max()),
        (-2.0, -2.0),
    ]


def test_options_and_providers_are_those_that_differ_from_defaults(
    recorder: Recorder, records: Path, model: Path
) -> None:
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


def test_sessions_with_equal_options_are_counted_together(
    recorder: Recorder, records: Path, model: Path
) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for one in (None, None, options):
        session_of(recorder, model, one).run(None, {"x": sample()})
    recorder.write()
    [record] = read_records(records)
    assert [(one.loads, one.runs) for one in record.models] == [(2, 2), (1, 1)]
    assert {one.path for one in record.models} == {str(model)}


def test_a_record_stays_readable_however_much_is_fed(recorder: Recorder, records: Path, model: Path) -> None:
    session = onnxruntime.InferenceSession(model, providers=CPU)
    feeds = recorder.opened(session, SessionRequest(model, None, CPU, None, {}))
    assert feeds is not None
    recorder.ran(feeds, {"x": sample()}, 0.1)
    for size in range(MAX_FEEDS - 1):
        recorder.ran(feeds, {"name" * 50_000: np.zeros(size)}, 0.1)
    found = read_model(recorder, records)
    assert (found.runs, found.feeds[0].inputs["x"].shape) == (MAX_FEEDS, sample().shape)
    assert len(found.feeds) < MAX_FEEDS


def test_a_model_given_as_bytes_is_kept_once(recorder: Recorder, records: Path, tmp_path: Path) -> None:
    text = add_model()
    for _ in range(2):
        session_of(recorder, text).run(None, {"x": [1.0, 2.0]})
    found = read_model(recorder, records)
    assert (found.path, found.size_bytes, found.loads) == (None, len(text), 2)
    assert found.saved is not None
    assert (records / found.saved).read_bytes() == text
    assert found.feeds[0].inputs["x"].values == (1.0, 2.0)


def test_a_failing_record_never_reaches_the_application(tmp_path: Path, model: Path) -> None:
    recorder = Recorder(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("no folder")
    session = session_of(recorder, model)
    assert session.run(None, {"x": sample()})[0].shape == (2, 4)


def test_what_onnxruntime_refuses_is_refused_and_not_counted(
    recorder: Recorder, records: Path, model: Path
) -> None:
    session = session_of(recorder, model)
    with pytest.raises(ValueError, match="x"):
        session.run(None, {"nothing": sample()})
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NoSuchFile):
        session_of(recorder, model.with_name("absent.onnx"))
    assert (read_model(recorder, records).loads, read_model(recorder, records).runs) == (1, 0)


def test_limits_cover_runs_whose_shapes_are_beyond_the_maximum() -> None:
    observer = FeedObserver()
    sizes = [500, 7, 7, *range(10, 200), 300]
    for size in sizes:
        observer.add({"ids": np.full((1, size), size, np.int64)})
    seen = {feed.inputs["ids"].shape[1]: feed for feed in observer.observed()}
    assert (observer.runs, len(seen), seen[7].runs) == (len(sizes), MAX_FEEDS, 2)
    assert seen.keys() >= {500, 7, 199, 300}  # the largest, the frequent, the latest
    assert observer.other_limits()["ids"][0] == 10


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([3, -1, 70_000, 5, 9], np.int64), (-1, 70_000, ())),
        (np.array([0.5, np.nan, np.inf, -2, 1], np.float32), (-2.0, 1.0, ())),
        (np.full(9, np.nan, np.float32), (None, None, ())),
        (np.array(16_000, np.int64), (16_000, 16_000, (16_000,))),
        (np.array([True]), (None, None, (True,))),
        (np.array(["yes", "no"], object), (None, None, ("no", "yes"))),
        (np.array(["x" * 1000], object), (None, None, ())),
        (np.zeros((1, 0), np.float32), (None, None, ())),
        (np.array([[1.5, 2.5]], np.float16), (1.5, 2.5, (1.5, 2.5))),
    ],
)
def test_limits_are_of_finite_numbers_and_values_of_small_arrays(
    array: np.ndarray[Any, Any], expected: tuple[Any, ...]
) -> None:
    observer = FeedObserver()
    observer.add({"x": array})
    seen = observer.observed()[0].inputs["x"]
    assert (seen.minimum, seen.maximum, seen.values) == expected


def test_limits_of_integers_are_those_of_all_runs_and_values_stay_few() -> None:
    observer = FeedObserver()
    for number in range(200):
        observer.add({"ids": np.full((2, 8), number, np.int64), "length": np.array([number])})
    seen = observer.observed()[0].inputs
    assert (seen["ids"].minimum, seen["ids"].maximum) == (0, 199)
    assert (seen["length"].maximum, seen["length"].values) == (199, ())


def test_large_arrays_are_looked_at_rarely_when_runs_are_quick() -> None:
    observer = FeedObserver()
    large = np.zeros(300_000, np.float32)
    for number in range(100):
        large[0] = number
        observer.spent_s = 1.0  # far more than 1 % of runs that took no time
        observer.add({"x": large})
    assert observer.observed()[0].inputs["x"].maximum == 7  # of the first eight runs
    observer.run_s = 1e6
    observer.add({"x": large})
    assert observer.observed()[0].inputs["x"].maximum == 99


APPLICATION = """
import multiprocessing, os, signal, sys
import numpy as np, onnxruntime

def work(runs):
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.ones((1, 8), np.float32))
    binding.bind_output("y")
    for _ in range(runs):
        session.run_with_iobinding(binding)
    assert type(session) is onnxruntime.capi.onnxruntime_inference_collection.InferenceSession

"""
ENDINGS = {
    "returns": ("work(3)", 0, [3]),
    "raises": ("work(3); raise SystemExit(7)", 7, [3]),
    "terminated": ("work(3); os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM, [3]),
    "forks": (
        "work(1); fork = multiprocessing.get_context('fork'); p = fork.Process(target=work, args=(3,))\n"
        "p.start(); p.join()",
        0,
        [1, 3],
    ),
}


def run_application(code: str, model: Path, records: Path) -> int:
    arguments = [sys.executable, "-c", APPLICATION + code, str(model), "--token", "secret"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), RECORDS_VARIABLE: str(records)}
    environment = startup_environment("ortprep.adopt.recorder:record_in", environment)
    return subprocess.run(arguments, timeout=60, env=environment).returncode


@pytest.mark.parametrize("code", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_ends_abruptly_leaves_its_first_run(model: Path, records: Path, code: str) -> None:
    run_application(f"work(3); {code}", model, records)
    [record] = read_records(records)
    assert (record.ended, record.models[0].runs > 0) == (False, True)


@pytest.mark.parametrize(("code", "returncode", "runs"), ENDINGS.values(), ids=ENDINGS)
def test_the_record_is_complete_however_the_process_ends(
    model: Path, records: Path, code: str, returncode: int, runs: Sequence[int]
) -> None:
    assert run_application(code, model, records) == returncode
    assert {one.program for one in read_records(records)} == {f"{Path(sys.executable).name} -c"}
    assert not any("secret" in one.read_text() for one in records.glob("*.json"))
    assert all(one.ended for one in read_records(records))
    models = [one.models[0] for one in read_records(records)]
    assert sorted(one.runs for one in models) == runs
    assert {one.feeds[0].inputs["x"].shape for one in models} == {(1, 8)}
