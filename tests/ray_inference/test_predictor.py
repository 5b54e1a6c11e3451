"""`OnnxPredictor` gives what a session gives that is run by hand, bit by bit.

What it does in tasks and actors of a cluster is in `test_deployments.py`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec, read_loader_config, write_loader_config
from ortprep.bundle.session_record import ProviderRecord
from ortprep.errors import InvalidRequestError, LoadError, PipelineError, PoolError, RunError
from ortprep.ray_inference import OnnxPredictor
from ortprep.ray_inference.predictor import Piece, cut, find_batch_sizes, plan_pieces
from ortprep.runtime import load
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.opened_model import choose_target
from tests.runtime.builders import CUDA_NEEDED
from tests.runtime.dropin.builders import run_python
from tests.runtime.pool.builders import (
    write_finding,
    write_model_bundle,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"
)


@pytest.fixture(autouse=True)
def environment_is_put_back():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def write_net(folder: Path, batch: int | str = "n") -> Path:
    """`y = x · x` row by row, `z = x + bias`, of rows of four."""
    length = batch if isinstance(batch, int) else 2
    x = np.arange(length * 4, dtype=np.float32).reshape(length, 4)
    bias = np.ones(4, np.float32)
    return write_model_bundle(
        folder,
        {"y": ("Mul", ("x", "x")), "z": ("Add", ("x", "bias"))},
        {"x": ("float32", (batch, 4)), "bias": ("float32", (4,))},
        {"y": ("float32", (batch, 4)), "z": ("float32", (batch, 4))},
        {"input:x": x, "input:bias": bias, "output:y": x * x, "output:z": x + bias},
    )


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return write_net(tmp_path_factory.mktemp("nets") / "net")


BIAS = {"bias": np.ones(4, np.float32)}


def rows(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    return {"x": rng.standard_normal((count, 4), np.float32), "id": np.arange(count)}


def test_a_model_of_any_length_gets_batches_as_they_come(tmp_path):
    predict, session = OnnxPredictor(write_net(tmp_path / "net"), constants=BIAS), load(tmp_path / "net")
    assert predict.batch_sizes == ()
    given = rows(7)
    y, z = session.run(None, {"x": given["x"], **BIAS})
    answer = predict(given)
    assert list(answer) == ["y", "z"]
    assert answer["y"].tobytes() == y.tobytes()
    assert answer["z"].tobytes() == z.tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_a_model_of_one_length_gets_batches_of_it_and_padding_is_dropped(tmp_path, count):
    predict, session = OnnxPredictor(write_net(tmp_path / "net", 4), constants=BIAS), load(tmp_path / "net")
    assert predict.batch_sizes == (4,)
    given = rows(count)
    padded = np.concatenate([given["x"], np.repeat(given["x"][-1:], -count % 4, axis=0)])
    by_hand = [session.run(["y"], {"x": padded[at : at + 4], **BIAS})[0] for at in range(0, count, 4)]
    expected = np.concatenate([*by_hand, np.empty((0, 4), np.float32)])[:count]
    answer = predict(given)
    assert answer["y"].shape == (count, 4)
    assert answer["y"].tobytes() == expected.tobytes()


def test_batches_are_cut_into_the_lengths_of_the_buckets(tmp_path):
    folder = write_net(tmp_path / "net")
    config = read_loader_config(folder)
    bucket = config.variants[0]._replace(name="cpu-n8", binding={"n": 8}, bucket=True)
    with_bucket = config._replace(schema_version="1.2", variants=(*config.variants, bucket))
    write_loader_config(folder, with_bucket)
    predict = OnnxPredictor(folder, constants=BIAS, load=ModelLoadOptions(digests="off"))
    assert predict.batch_sizes == (8,)
    assert (
        OnnxPredictor(folder, constants=BIAS, load=ModelLoadOptions(digests="off", buckets=False)).batch_sizes
        == ()
    )
    given = rows(19)
    assert (predict(given)["y"] == given["x"] * given["x"]).all()


def test_columns_are_taken_named_and_kept_as_asked(tmp_path):
    folder = write_net(tmp_path / "net")
    given = {"image": rows(3)["x"], "id": np.arange(3), "y": np.zeros(3)}
    predict = OnnxPredictor(
        folder, columns={"x": "image"}, outputs={"y": "squared"}, constants=BIAS, keep=["id"]
    )
    assert list(predict(given)) == ["id", "squared"]
    everything = OnnxPredictor(folder, columns={"x": "image"}, outputs=["y"], constants=BIAS, keep=True)
    answer = everything(given)
    assert sorted(answer) == ["id", "image", "y"]
    assert (answer["y"] == given["image"] ** 2).all()


def test_what_does_not_fit_is_named(tmp_path):
    folder = write_net(tmp_path / "net")
    predict = OnnxPredictor(folder, constants=BIAS, keep=["id"])
    with pytest.raises(InvalidRequestError, match=r"no column 'x' for net[\s\S]*among a, b"):
        predict({"a": np.ones(1), "b": np.ones(1)})
    with pytest.raises(InvalidRequestError, match=r"input 'x'[\s\S]*expected float32, got float64"):
        predict({"x": np.ones((1, 4)), "id": np.arange(1)})
    with pytest.raises(RunError, match="x"):
        predict({"x": np.ones((1, 5), np.float32), "id": np.arange(1)})
    with pytest.raises(InvalidRequestError, match="no column 'id'"):
        predict({"x": np.ones((1, 4), np.float32)})
    with pytest.raises(PoolError, match="bad columns: net has no 'w'"):
        OnnxPredictor(folder, columns={"w": "x"})
    with pytest.raises(PoolError, match="bad outputs: net has no 'q'"):
        OnnxPredictor(folder, constants=BIAS, outputs=["q"])
    with pytest.raises(PoolError, match="expected a column for each"):
        OnnxPredictor(folder, constants=BIAS, outputs={"y": "a", "z": "a"})
    with pytest.raises(PoolError, match="bad constants: net has no input left"):
        OnnxPredictor(folder, constants={**BIAS, "x": np.ones((2, 4), np.float32)})
    with pytest.raises(LoadError, match="device"):
        OnnxPredictor(folder, device="tpu")


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (np.array([0, 0, 0, 1e39]), "expected float32, got float64"),
        (["1", "2", "3", "4"], "expected float32, got <U1"),
        (np.ones(3, np.float32), "bias|3 by 4"),
    ],
)
def test_a_constant_of_another_type_or_shape_is_refused(net, bias, said):
    with pytest.raises(PipelineError, match=said):
        OnnxPredictor(net, constants={"bias": bias})(rows(2))


def test_a_batch_without_rows_has_columns_without_rows(net):
    predict = OnnxPredictor(net, constants=BIAS, keep=["id"])
    columns: list[Any] = [[], np.array([], object), np.empty((0, 4), np.float32)]
    for x in columns:
        answer = predict({"x": x, "id": np.array([], np.int64)})
        assert {name: column.shape for name, column in answer.items()} == {
            "id": (0,),
            "y": (0, 4),
            "z": (0, 4),
        }
        assert answer["y"].dtype == np.float32


def test_a_constant_is_what_it_was_when_it_was_given(net):
    bias = np.ones(4, ">f4")
    predict = OnnxPredictor(net, constants={"bias": bias}, outputs=["z"])
    bias[...] = 5
    assert (predict(rows(3))["z"] == rows(3)["x"] + 1).all()


def test_a_constant_without_axes_keeps_having_none(tmp_path):
    x = np.arange(4).reshape(2, 2)
    folder = write_model_bundle(
        tmp_path / "net",
        {"axes": ("Shape", ("rate",)), "rank": ("Size", ("axes",)), "y": ("Add", ("x", "rank"))},
        {"x": ("int64", ("n", 2)), "rate": ("int64", ())},
        {"y": ("int64", ("n", 2))},
        {"input:x": x, "input:rate": np.array(16000), "output:y": x},
    )
    predict = OnnxPredictor(folder, constants={"rate": np.array(16000)})
    assert (predict({"x": x})["y"] == x).all()


def test_an_output_that_has_no_rows_is_refused_however_long_it_is(tmp_path):
    folder = write_finding(tmp_path / "finding")
    for outputs in (None, ["y"], {"z": "a", "y": "b"}):
        with pytest.raises(PoolError, match="output 'y' of finding does not have one row per input row"):
            OnnxPredictor(folder, outputs=outputs)({"x": np.ones((3, 2), np.float32)})
    x = np.ones((3, 2), np.float32)
    assert (OnnxPredictor(folder, outputs=["z"])({"x": x})["z"] == -x).all()


def test_a_process_that_may_see_gpus_takes_the_first_variant_for_the_cpu(net, tmp_path):
    config = read_loader_config(net)
    cpu = config.variants[0]
    cuda = cpu._replace(
        name="cuda",
        target="cuda",
        providers=(ProviderRecord("CUDAExecutionProvider"), *cpu.providers),
        requirements=CUDA_NEEDED,
    )
    folder = tmp_path / "both"
    shutil.copytree(net, folder)
    write_loader_config(folder, config._replace(variants=(cuda, cpu)))
    assert choose_target(folder, ModelLoadOptions(), on_gpu=False) == "cpu"
    assert choose_target(net, ModelLoadOptions(), on_gpu=False) is None
    assert choose_target(folder, ModelLoadOptions(), on_gpu=True) is None
    assert choose_target(folder, ModelLoadOptions(target="cuda"), on_gpu=False) == "cuda"
    assert OnnxPredictor(folder, constants=BIAS, load=ModelLoadOptions(digests="off")).variant == "cpu"


sizes = st.lists(st.integers(1, 64), max_size=4)


@given(st.integers(0, 300), sizes)
def test_every_row_is_in_one_piece_and_in_order(count, lengths):
    pieces = list(plan_pieces(count, lengths))
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(count))
    assert {piece.size for piece in pieces} <= set(lengths or [count])
    assert all(piece.stop - piece.start == piece.size for piece in pieces[:-1])


@given(st.integers(1, 40), sizes)
def test_what_is_cut_is_what_it_was_and_padding_repeats_the_last_row(count, lengths):
    rows = np.arange(count * 2).reshape(count, 2)
    pieces = list(plan_pieces(count, lengths))
    parts = [cut(rows, piece) for piece in pieces]
    assert [len(part) for part in parts] == [piece.size for piece in pieces]
    joined = np.concatenate(parts)
    assert (joined[:count] == rows).all()
    assert (joined[count:] == rows[-1]).all()


def test_the_remainder_goes_in_the_smallest_batch_that_takes_it():
    assert list(plan_pieces(41, (1, 8, 32))) == [Piece(0, 32, 32), Piece(32, 41, 32)]
    assert list(plan_pieces(37, (1, 8, 32))) == [Piece(0, 32, 32), Piece(32, 37, 8)]
    assert list(plan_pieces(11, ())) == [Piece(0, 11, 11)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"b": (4, 3), "c": (5,)}, "different fixed batch sizes"),
        ({"b": (4, 3), "k": ()}, "'k' has no axis for rows"),
    ],
)
def test_inputs_without_a_common_length_of_batches_are_refused(net, inputs, message):
    config = read_loader_config(net)
    tensors = tuple(TensorSpec(name, "float32", shape) for name, shape in inputs.items())
    with pytest.raises(PoolError, match=message):
        find_batch_sizes(config._replace(inputs=tensors), ())
    *_, last = inputs
    assert find_batch_sizes(config._replace(inputs=tensors), (last,)) == (4,)


BUILD = {"onnx", "doit", "typer", "ortprep.stages", "ortprep.build", "ortprep.tuning"}
PACKAGE = "ortprep.ray_inference"


@pytest.mark.parametrize(
    ("statement", "left_out"),
    [
        (f"import {PACKAGE}", {"ray", "numpy", "onnxruntime"}),
        (f"from {PACKAGE} import OnnxPredictor, ServeConfig, pin_bundle", {"ray", *BUILD}),
        (f"import {PACKAGE}.deployment, {PACKAGE}.pinning, {PACKAGE}.predictor", BUILD),
    ],
)
def test_a_node_needs_ray_and_what_a_job_needs_and_nothing_of_the_build(statement, left_out):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert not left_out & set(done.stdout.split())
