"""A job calls a deployment by its Serve handle, and gets what a session would have answered."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from ortprep.cluster import ServeConfig
from ortprep.cluster.serving.pinning import pin_version, require_version
from ortprep.errors import IntegrityError, InvalidRequestError, RunError
from tests.cluster.serving.builders import deployed
from tests.cluster.serving.conftest import batch
from tests.runtime.pool.builders import write_doubling, write_passing_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray"),
]

ONE = np.ones((1, 1), np.float32)


@pytest.fixture(scope="module")
def handle(served, bundle, tmp_path_factory):
    same = write_passing_on(tmp_path_factory.mktemp("models") / "same", "float32", ONE)
    with deployed(bundle, same, config=ServeConfig(cpus=0.4), replicas=len(served.nodes)) as made:
        yield made


def test_replicas_answer_each_of_their_models(handle, served):
    assert len(served.replicas()) == len(served.nodes)
    for size in (1, 4, 300_000):
        inputs = batch(3, size)
        doubled = handle.run.remote(inputs, model="doubling").result(timeout_s=300)
        assert (doubled["y"] == 2 * inputs["x"]).all()
        assert (handle.run.remote(inputs, "same").result(timeout_s=300)["y"] == inputs["x"]).all()


@pytest.mark.parametrize(
    ("inputs", "model", "message"),
    [
        (batch(), None, "expected one of doubling, same"),
        ({}, "doubling", "got none"),
        ({"x": np.ones((1, 2))}, "doubling", "expected float32, got float64"),
    ],
)
def test_wrong_requests_are_refused(handle, inputs, model, message):
    with pytest.raises(InvalidRequestError, match=message):
        handle.run.remote(inputs, model).result(timeout_s=300)


def test_what_onnx_runtime_refuses_fails_alone(handle):
    wrong = handle.run.remote({"x": np.ones((1, 2, 3), np.float32)}, "doubling")
    right = [handle.run.remote(batch(n), "doubling") for n in range(10)]
    with pytest.raises(RunError, match="ONNX Runtime cannot run doubling"):
        wrong.result(timeout_s=300)
    assert [float(one.result(timeout_s=300)["y"][0, 0]) for one in right] == [2.0 * n for n in range(10)]


def test_a_bundle_that_is_replaced_in_its_folder_is_refused(tmp_path):
    folder = write_doubling(tmp_path / "net")
    name, pinned = pin_version(str(folder))
    assert name == "net"
    require_version(pinned, folder)
    shutil.rmtree(folder)
    write_passing_on(folder, "float32", ONE)
    with pytest.raises(IntegrityError, match="another build"):
        require_version(pinned, folder)
