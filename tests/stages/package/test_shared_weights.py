"""A bundle has the weights of its variants once."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from ortprep.errors import ChildError
from ortprep.stages.package import prepared_variants, shared_weights
from ortprep.stages.package.prepared_variants import _place_files
from ortprep.stages.package.shared_weights import SharingRequest, share_weights
from tests import builders as models

SIDE = 600
FIRST, SECOND = (
    np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32) for seed in (0, 1)
)


def write_product(path, weights, *, padding=0):
    """Writes `y = x @ w0 @ w1 …`, with the weights in the given order and bytes before them."""
    names = ["x", *(f"t{index}" for index in range(1, len(weights))), "y"]
    nodes = (f"{names[n + 1]} = MatMul({names[n]}, {name})" for n, name in enumerate(sorted(weights)))
    model = models.parse(f"(float[n, {SIDE}] x) => (float[n, {SIDE}] y) {{ {' '.join(nodes)} }}")
    data = bytes(padding)
    for name in sorted(weights, reverse=bool(padding)):
        raw = weights[name].tobytes()
        tensor = model.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=(SIDE, SIDE))
        models.point_outside(tensor, f"{path.name}.data", offset=len(data), length=len(raw))
        data += raw
    models.write_model(model, path).with_name(f"{path.name}.data").write_bytes(data)
    return path


def answer(path):
    x = np.ones((2, SIDE), np.float32)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def test_a_variant_whose_weights_are_in_anothers_file_takes_that_file(tmp_path):
    weights, bundle = {"w0": FIRST, "w1": SECOND}, tmp_path / "bundle"
    write_product(bundle / "cpu/net.onnx", weights, padding=4096)
    own = write_product(tmp_path / "work/net.onnx", weights)
    entries = _place_files(own, bundle, "portable")
    shared = bundle / "portable/net.onnx.data"
    assert shared.samefile(bundle / "cpu/net.onnx.data")
    assert [entry.path for entry in entries] == ["portable/net.onnx", "portable/net.onnx.data"]
    np.testing.assert_array_equal(answer(bundle / "portable/net.onnx"), answer(own))


def test_a_tuned_variant_keeps_its_file_and_so_its_packed_forms(tmp_path):
    weights, bundle = {"w0": FIRST}, tmp_path / "bundle"
    write_product(bundle / "cuda/net.onnx", weights)
    own = write_product(tmp_path / "work/net.onnx", weights)
    _place_files(own, bundle, "cpu")
    assert (bundle / "cpu/net.onnx.data").samefile(own.with_name("net.onnx.data"))


def test_data_of_a_branch_is_shared_with_nobody(tmp_path, monkeypatch):
    models = [write_product(tmp_path / name / "net.onnx", {"w0": FIRST}) for name in ("own", "other")]
    for refused in models:
        monkeypatch.setattr(shared_weights, "unlinkable_files", lambda path, one=refused: path == one)
        assert share_weights(SharingRequest(models[0], (models[1],), tmp_path / "new/net.onnx")) is None


def test_a_variant_with_another_weight_keeps_its_own_file(tmp_path):
    bundle = tmp_path / "bundle"
    write_product(bundle / "cpu/net.onnx", {"w0": FIRST, "w1": SECOND})
    own = write_product(tmp_path / "work/net.onnx", {"w0": FIRST, "w1": FIRST + SECOND})
    _place_files(own, bundle, "portable")
    assert not (bundle / "portable/net.onnx.data").samefile(bundle / "cpu/net.onnx.data")
    np.testing.assert_array_equal(answer(bundle / "portable/net.onnx"), answer(own))


@pytest.mark.parametrize("others", [(), ("cpu",)])
def test_a_model_with_its_weights_inside_shares_none(tmp_path, others):
    products = [write_product(tmp_path / name / "net.onnx", {"w0": FIRST}) for name in ("own", *others)]
    inside = tmp_path / "inside.onnx"
    onnx.save(onnx.load(products[0]), inside)
    assert share_weights(SharingRequest(inside, tuple(products[1:]), tmp_path / "new/net.onnx")) is None
    assert not (tmp_path / "new").exists()


def test_a_child_that_dies_while_it_writes_costs_a_copy(tmp_path, monkeypatch):
    def die(_function, request, **_):
        request.written.parent.mkdir()
        request.written.write_bytes(b"half")
        raise ChildError("died")

    monkeypatch.setattr(prepared_variants, "run_child", die)
    bundle = tmp_path / "bundle"
    write_product(bundle / "cpu/net.onnx", {"w0": FIRST})
    own = write_product(tmp_path / "work/net.onnx", {"w0": FIRST})
    _place_files(own, bundle, "portable")
    np.testing.assert_array_equal(answer(bundle / "portable/net.onnx"), answer(own))
