"""Requests of the Open Inference Protocol: what a client sends is taken, or refused with a reason."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortprep.bundle.loader_config import FileEntry as Entry
from ortprep.bundle.loader_config import Golden, LoaderConfig, TensorSpec, Tolerance
from ortprep.ray_inference.inference_protocol import (
    MAX_HEADER_BYTES,
    ProtocolError,
    datatype_of,
    encode_response,
    parse_request,
)
from ortprep.runtime.tensors.element_types import numpy_dtype

CONFIG = LoaderConfig(
    "1.1",
    "net",
    (TensorSpec("x", "float32", ("n", 2)), TensorSpec("k", "int8", (1,))),
    (TensorSpec("y", "float32", ("n", 2)), TensorSpec("z", "bool", None)),
    Golden(Entry("golden.npz", 0, "sha256:" + "0" * 64), Tolerance(0, 0)),
    (),
)
TYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "bfloat16",
)  # fmt: skip


def config_of(dtype):
    tensor = TensorSpec("x", dtype, None)
    return CONFIG._replace(inputs=(tensor,), outputs=(tensor,))


def entry(name, datatype, shape, **rest):
    return {"name": name, "datatype": datatype, "shape": shape, **rest}


K = entry("k", "INT8", [1], data=[3])
X = entry("x", "FP32", [2, 2], data=[[1, 2], [3, 4.5]])


def body(*inputs, **rest):
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def test_json_tensors_may_be_nested_or_flat_and_come_in_any_order():
    for data in ([[1, 2], [3, 4.5]], [1, 2, 3, 4.5]):
        request = parse_request(body(K, {**X, "data": data}, id="7"), None, CONFIG)
        x, k = request.arrays.values()
        assert x.tolist() == [[1, 2], [3, 4.5]]
        assert [x.dtype.name, k.dtype.name, k.tolist()] == ["float32", "int8", [3]]
        assert request.id == "7"
        assert [output.index for output in request.outputs] == [0, 1]


@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data())
@settings(max_examples=20)
def test_binary_tensors_of_every_type_come_back_as_they_were(dtype, data):
    config, kind = config_of(dtype), numpy_dtype(dtype)
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    raw = data.draw(st.binary(min_size=(n := math.prod(shape) * kind.itemsize), max_size=n))
    if dtype == "bool":
        raw = bytes(byte % 2 for byte in raw)
    tensor = entry("x", datatype_of(config.inputs[0]), shape, parameters={"binary_data_size": len(raw)})
    header = body(tensor, parameters={"binary_data_output": True})
    request = parse_request(header + raw, len(header), config)
    (array,) = request.arrays.values()
    assert (array.dtype, list(array.shape), array.tobytes()) == (kind, shape, raw)
    answer, length = encode_response(request, "net", "v", config, [array])
    assert answer[length:] == raw
    (said,) = json.loads(answer[:length])["outputs"]
    assert said == tensor


def answer_of(request, answers):
    text, length = encode_response(parse_request(request, None, CONFIG), "net", "v", CONFIG, answers)
    assert length is None
    return dict(json.loads(text))


def test_a_json_answer_says_what_it_is():
    said = answer_of(
        body(X, K, outputs=[{"name": "z"}], id="a"), [np.zeros((1, 2), np.float32), np.array([[True]])]
    )
    assert said == {
        "model_name": "net",
        "model_version": "v",
        "id": "a",
        "outputs": [{"name": "z", "datatype": "BOOL", "shape": [1, 1], "data": [True]}],
    }


BIG = 10**18
WRONG = {
    "not json": b"{",
    "too deep": b"[" * 60_000,
    "no object": b"[]",
    "no inputs": b"{}",
    "inputs no list": b'{"inputs": {}}',
    "missing": body(X),
    "unknown": body(X, K, entry("w", "FP32", [1], data=[1])),
    "twice": body(X, X, K),
    "another type": body({**X, "datatype": "FP64"}, K),
    "no type": body({**X, "datatype": None}, K),
    "negative": body({**X, "shape": [-1, 2]}, K),
    "boolean size": body({**X, "shape": [True, 2]}, K),
    "huge": body({**X, "shape": [BIG, 2]}, K),
    "too few": body({**X, "data": [1, 2, 3]}, K),
    "ragged": body({**X, "data": [[1, 2], [3]]}, K),
    "text": body({**X, "data": ["1", "2", "3", "4"]}, K),
    "a long text": body({**X, "data": ["1" * 2**20, *["1"] * 2**17]}, K),
    "null": body({**X, "data": [1, 2, 3, None]}, K),
    "no data": body({"name": "x", "datatype": "FP32", "shape": [2, 2]}, K),
    "out of range": body(X, {**K, "data": [300]}),
    "out of range of floats": body({**X, "data": [1, 2, 3, 1e39]}, K),
    "fraction": body(X, {**K, "data": [1.5]}),
    "endless integer": body(X, {**K, "data": [10**30]}),
    "shared memory": body({**X, "parameters": {"shared_memory_region": "r"}}, K),
    "classification": body(X, K, outputs=[{"name": "y", "parameters": {"classification": 2}}]),
    "unknown output": body(X, K, outputs=[{"name": "w"}]),
    "output twice": body(X, K, outputs=[{"name": "y"}, {"name": "y"}]),
    "output no name": body(X, K, outputs=[{"name": ["y"]}]),
    "id no text": body(X, K, id=7),
    "binary and data": body({**X, "parameters": {"binary_data_size": 16}}, K),
    "bytes missing": body(entry("x", "FP32", [2, 2], parameters={"binary_data_size": 16}), K),
    "more bytes than a number that can be written": body(
        *[entry("x", "FP32", [2, 2], parameters={"binary_data_size": 10**4300 - 1})] * 2
    ),
    "negative bytes": body(entry("x", "FP32", [2, 2], parameters={"binary_data_size": -16}), K),
}


@pytest.mark.attack
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_in_a_few_words(case):
    with pytest.raises(ProtocolError) as caught:
        parse_request(WRONG[case], None, CONFIG)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 600
    if case in ("missing", "unknown", "twice"):
        assert "x FP32 [-1, 2], k INT8 [1]" in str(caught.value)


@pytest.mark.attack
@pytest.mark.parametrize("shape", [[10**4200, 1], [10**4200, 10**4200]])
def test_a_shape_that_cannot_be_is_refused_where_the_model_takes_any(shape):
    config = CONFIG._replace(inputs=(TensorSpec("x", "float32", None),))
    for rest in ({"data": [1]}, {"parameters": {"binary_data_size": 4}}):
        with pytest.raises(ProtocolError, match="does not fit"):
            parse_request(body(entry("x", "FP32", shape, **rest)), None, config)


@pytest.mark.attack
def test_many_outputs_are_refused_at_the_first_that_is_wrong():
    wanted = body(X, K, outputs=[{"name": "y"}] * 60_000)
    begun = time.process_time()
    with pytest.raises(ProtocolError, match="each once"):
        parse_request(wanted, None, CONFIG)
    assert time.process_time() - begun < 5


@pytest.mark.attack
def test_complex_numbers_travel_as_bytes_alone():
    config, raw = config_of("complex64"), np.array([1 + 2j], np.complex64).tobytes()
    with pytest.raises(ProtocolError, match="wrong data"):
        parse_request(body(entry("x", "COMPLEX64", [1], data=[1])), None, config)
    header = body(entry("x", "COMPLEX64", [1], parameters={"binary_data_size": len(raw)}))
    request = parse_request(header + raw, len(header), config)
    with pytest.raises(ProtocolError, match="binary_data_output"):
        encode_response(request, "net", "v", config, list(request.arrays.values()))


@pytest.mark.attack
def test_texts_do_not_travel_as_bytes():
    sent = body(entry("x", "STRING", [3], parameters={"binary_data_size": 0}))
    with pytest.raises(ProtocolError, match="wrong data"):
        parse_request(sent, len(sent), config_of("string"))


def test_unsigned_integers_of_any_size_travel_as_json():
    values = [2**63, 1, 2**64 - 1]
    request = parse_request(body(entry("x", "UINT64", [3], data=values)), None, config_of("uint64"))
    assert request.arrays["x"].tolist() == values


@pytest.mark.attack
@pytest.mark.parametrize("length", [0, -1, 10**9, MAX_HEADER_BYTES + 1])
def test_a_header_has_a_length_that_can_be(length):
    with pytest.raises(ProtocolError, match="Inference-Header-Content-Length"):
        parse_request(body(X, K).ljust(MAX_HEADER_BYTES + 10), length, CONFIG)


@pytest.mark.attack
@given(st.binary(max_size=200), st.none() | st.integers(-5, 300))
def test_no_bytes_do_more_than_be_refused(text, length):
    with pytest.raises(ProtocolError):
        parse_request(text, length, CONFIG)


@pytest.mark.attack
@pytest.mark.parametrize("shape", [[0, 200_000_000], [200_000_000, 0], [0, 2**13, 2**13], [0, 2**62, 2**62]])
def test_an_empty_tensor_has_no_size_that_takes_gigabytes_of_a_graph(shape):
    config = CONFIG._replace(inputs=(TensorSpec("x", "float32", None),))
    empty = ({"data": []}, {"parameters": {"binary_data_size": 0}})
    for data in empty:
        request = body(entry("x", "FP32", shape, **data))
        with pytest.raises(ProtocolError, match="at most 33554432 together"):
            parse_request(request, None if "data" in data else len(request), config)


@pytest.mark.attack
@pytest.mark.parametrize("byte", [b"\xff", b"\x02", b"\x80"])
def test_bytes_that_are_no_booleans_are_refused(byte):
    """`Compress` sums the bytes of its condition: its output was 255 times as long as what it kept."""
    header = body(entry("x", "BOOL", [4096], parameters={"binary_data_size": 4096}))
    with pytest.raises(ProtocolError, match="bytes of 0 and 1"):
        parse_request(header + byte * 4096, len(header), config_of("bool"))


@pytest.mark.attack
@pytest.mark.parametrize("unit", ["[[[[[[[[[[0]]]]]]]]]],", "[0],", "[],", '{"":0},'])
@pytest.mark.parametrize("key", ["data", "shape"])
def test_lists_and_objects_are_counted_before_json_is_parsed(unit, key):
    lists = (unit * (2**20 // len(unit))).rstrip(",")
    text = json.dumps({"inputs": [entry("x", "FP32", [1, 1], data=[1]) | {key: "LISTS"}]})
    with pytest.raises(ProtocolError, match="too many lists") as caught:
        parse_request(text.replace('"LISTS"', f"[{lists}]").encode(), None, config_of("float32"))
    assert caught.value.status == 413
    rows = entry("x", "FP32", [20_000, 2], data=[[0.5, 1.5]] * 20_000)
    assert parse_request(body(rows), None, config_of("float32")).arrays["x"].shape == (20_000, 2)


@pytest.mark.parametrize("shape", [[0], [0, 3, 224, 224], [0, 3, 2160, 3840], [0, 0], [0, 1_440_000]])
def test_an_empty_batch_comes_through(shape):
    config = CONFIG._replace(inputs=(TensorSpec("x", "float32", None),))
    request = parse_request(body(entry("x", "FP32", shape, data=[])), None, config)
    assert list(request.arrays["x"].shape) == shape
