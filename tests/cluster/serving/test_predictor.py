"""`OnnxPredictor` gives Ray Data what a session gives whoever runs it by hand, bit by bit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.bundle.loader_config import read_loader_config, write_loader_config
from pipeline.cluster import OnnxPredictor
from pipeline.errors import InvalidRequestError, LoadError, PoolError
from pipeline.runtime import load
from tests.cluster.small_cluster import SmallCluster
from tests.runtime.pool.pool_bundles import write_model_bundle

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"
)


@pytest.fixture(autouse=True)
def environment_is_put_back() -> Iterator[None]:
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


BIAS = {"bias": np.ones(4, np.float32)}


def rows(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    return {"x": rng.standard_normal((count, 4), np.float32), "id": np.arange(count)}


def test_a_model_of_any_length_gets_batches_as_they_come(tmp_path: Path) -> None:
    predict, session = OnnxPredictor(write_net(tmp_path / "net"), constants=BIAS), load(tmp_path / "net")
    assert predict.batch_sizes == ()
    given = rows(7)
    y, z = session.run(None, {"x": given["x"], **BIAS})
    answer = predict(given)
    assert list(answer) == ["y", "z"]
    assert answer["y"].tobytes() == y.tobytes()
    assert answer["z"].tobytes() == z.tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_a_model_of_one_length_gets_batches_of_it_and_padding_is_dropped(tmp_path: Path, count: int) -> None:
    predict, session = OnnxPredictor(write_net(tmp_path / "net", 4), constants=BIAS), load(tmp_path / "net")
    assert predict.batch_sizes == (4,)
    given = rows(count)
    padded = np.concatenate([given["x"], np.repeat(given["x"][-1:], -count % 4, axis=0)])
    by_hand = [session.run(["y"], {"x": padded[at : at + 4], **BIAS})[0] for at in range(0, count, 4)]
    expected = np.concatenate([*by_hand, np.empty((0, 4), np.float32)])[:count]
    answer = predict(given)
    assert answer["y"].shape == (count, 4)
    assert answer["y"].tobytes() == expected.tobytes()


def test_batches_are_cut_into_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    predict = OnnxPredictor(write_net(tmp_path / "net"), constants=BIAS, batch_sizes=[2, 8])
    given = rows(13)
    assert (predict(given)["y"] == given["x"] * given["x"]).all()


def test_batches_are_cut_into_the_lengths_of_the_buckets(tmp_path: Path) -> None:
    folder = write_net(tmp_path / "net")
    config = read_loader_config(folder)
    bucket = dataclasses.replace(config.variants[0], name="cpu-n8", binding={"n": 8}, bucket=True)
    with_bucket = dataclasses.replace(config, schema_version="1.2", variants=(*config.variants, bucket))
    write_loader_config(folder, with_bucket)
    predict = OnnxPredictor(folder, constants=BIAS, digests="off")
    assert predict.batch_sizes == (8,)
    assert OnnxPredictor(folder, constants=BIAS, digests="off", buckets=False).batch_sizes == ()
    given = rows(19)
    assert (predict(given)["y"] == given["x"] * given["x"]).all()


def test_columns_are_taken_named_and_kept_as_asked(tmp_path: Path) -> None:
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


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = write_net(tmp_path / "net")
    predict = OnnxPredictor(folder, constants=BIAS, keep=["id"])
    with pytest.raises(InvalidRequestError, match=r"no column 'x' for input 'x' of net[\s\S]*among a, b"):
        predict({"a": np.ones(1), "b": np.ones(1)})
    with pytest.raises(
        InvalidRequestError, match=r"column 'x'[\s\S]*float32 \[4\], got rows of float64 \[4\]"
    ):
        predict({"x": np.ones((1, 4))})
    with pytest.raises(InvalidRequestError, match="no column 'id' to keep"):
        predict({"x": np.ones((1, 4), np.float32)})
    with pytest.raises(PoolError, match="net has no input 'w'"):
        OnnxPredictor(folder, columns={"w": "x"})
    with pytest.raises(PoolError, match="net has no output 'q'"):
        OnnxPredictor(folder, constants=BIAS, outputs=["q"])
    with pytest.raises(PoolError, match="bad batch_sizes"):
        OnnxPredictor(folder, constants=BIAS, batch_sizes=[0])
    with pytest.raises(LoadError, match="device"):
        OnnxPredictor(folder, device="tpu")


def test_a_bundle_that_answers_wrongly_is_never_used(tmp_path: Path) -> None:
    folder = write_net(tmp_path / "net")
    other = write_model_bundle(
        tmp_path / "other",
        {"y": ("Add", ("x", "x")), "z": ("Add", ("x", "bias"))},
        {"x": ("float32", ("n", 4)), "bias": ("float32", (4,))},
        {"y": ("float32", ("n", 4)), "z": ("float32", ("n", 4))},
        {"input:x": np.ones((2, 4), np.float32)},
    )
    model = "cpu/model_optimized.onnx"
    (folder / model).write_bytes((other / model).read_bytes())
    with pytest.raises(LoadError, match="does not answer as recorded"):
        OnnxPredictor(folder, constants=BIAS, digests="off")


def test_a_dataset_is_answered_row_by_row_on_all_nodes(nodes: SmallCluster, tmp_path: Path) -> None:
    import ray.data

    folder = write_net(tmp_path / "net", 4)
    ray.data.DataContext.get_current().enable_progress_bars = False
    given = rows(1000)
    # Blocks that are there already: beside the actors there is no processor for tasks that would make some.
    dataset = ray.data.from_numpy(np.split(given["x"], [100, 330, 331, 800]))
    answers = dataset.map_batches(
        OnnxPredictor,
        fn_constructor_kwargs={
            "bundle": str(folder),
            "columns": {"x": "data"},
            "constants": BIAS,
            "outputs": ["y"],
            "keep": True,
        },
        batch_size=50,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    ).take_all()
    assert len(answers) == 1000
    by_image = {row["data"].tobytes(): row["y"] for row in answers}
    session = load(folder)
    for at in range(0, 1000, 4):
        batch = given["x"][at : at + 4]
        (y,) = session.run(["y"], {"x": batch, **BIAS})
        for row, expected in zip(batch, y, strict=True):
            assert by_image[row.tobytes()].tobytes() == expected.tobytes()
