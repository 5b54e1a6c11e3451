"""ONNX models of a few hundred bytes, written field by field: the runtime's tests have no onnx package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IR_VERSION = 8
OPSET = 17
_FLOAT = 1
_EXTERNAL = 1

Weights = NDArray[np.float32]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _value(name: str, shape: Sequence[int | str], code: int = _FLOAT) -> bytes:
    sizes = (_field(1, size) if isinstance(size, int) else _field(2, size) for size in shape)
    tensor = _field(1, code) + _field(2, b"".join(_field(1, size) for size in sizes))
    return _field(1, name) + _field(2, _field(1, tensor))


def _node(operator: str, inputs: Sequence[str], output: str) -> bytes:
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, operator)


def _tensor(name: str, array: Weights) -> bytes:
    shape = b"".join(_field(1, size) for size in array.shape)
    return shape + _field(2, _FLOAT) + _field(8, name) + _field(9, array.tobytes())


def _external_tensor(name: str, array: Weights, file: str, offset: int, tag_bits: int = 0) -> bytes:
    entries = {"location": file, "offset": str(offset), "length": str(array.nbytes)}
    shape = b"".join(_field(1, size) for size in array.shape)
    texts = [_field(1, key) + _field(2, value) for key, value in entries.items()]
    places = b"".join(_varint((13 << 3 | 2) + tag_bits) + _varint(len(text)) + text for text in texts)
    return shape + _field(2, _FLOAT) + _field(8, name) + places + _field(14, _EXTERNAL)


def _model(
    nodes: Sequence[bytes],
    tensors: Sequence[bytes],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    types: Mapping[str, int] | None = None,
) -> bytes:
    codes = types or {}
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, "graph"),
            *(_field(5, tensor) for tensor in tensors),
            *(_field(11, _value(name, shape, codes.get(name, _FLOAT))) for name, shape in inputs.items()),
            *(_field(12, _value(name, shape, codes.get(name, _FLOAT))) for name, shape in outputs.items()),
        ]
    )
    return _field(1, IR_VERSION) + _field(7, graph) + _field(8, _field(1, "") + _field(2, OPSET))


def write_linear(path: Path, weights: Weights, batch: int | str = "batch") -> tuple[Path, Path]:
    """Writes `y = x @ weights` with the weights in `<path>.data`; returns both files. x is (batch, rows)."""
    data = path.with_name(path.name + ".data")
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(weights.tobytes())
    rows, columns = weights.shape
    path.write_bytes(
        _model(
            [_node("MatMul", ("x", "w"), "y")],
            [_external_tensor("w", weights, data.name, 0)],
            {"x": (batch, rows)},
            {"y": (batch, columns)},
        )
    )
    return path, data


def write_chain(path: Path, length: int) -> Path:
    """Writes a model of `length` Relu nodes in a row, which takes long to load though it is small."""
    nodes = [_node("Relu", (f"t{i}",), f"t{i + 1}") for i in range(length)]
    path.write_bytes(_model(nodes, [], {"t0": (4,)}, {f"t{length}": (4,)}))
    return path


def add_model() -> bytes:
    """Returns `y = x + x` on two floats."""
    return _model([_node("Add", ("x", "x"), "y")], [], {"x": (2,)}, {"y": (2,)})


def operator_model(
    operators: Mapping[str, tuple[str, Sequence[str]]],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    types: Mapping[str, int] | None = None,
) -> bytes:
    """Returns a model of operators without attributes.

    Args:
        operators: Operator and input names, by the name of its output.
        inputs: Shapes by name.
        outputs: Likewise.
        types: Numbers of element types by name; float32 for others.
    """
    nodes = [_node(kind, names, output) for output, (kind, names) in operators.items()]
    return _model(nodes, [], inputs, outputs, types)


def refer_to(location: str, place: str, *, tag_bits: int = 0) -> bytes:
    """Returns a model that answers `y = x @ w`, and somewhere refers to a file of external data.

    Args:
        location: What it names.
        place: `weights`: w itself; or, in what no run needs, a `constant`, a `subgraph`, a `function`, or the
            `default` of a function's attribute.
        tag_bits: Added to the tags of the weights' references.
    """
    weights = np.zeros((8, 4), np.float32)
    outside = _external_tensor("outside", weights, location, 0)
    hidden = _field(5, _field(1, "value") + _field(5, outside) + _field(20, 4))
    constant = _node("Constant", (), "unused") + hidden
    branch = _field(1, constant) + _field(2, "branch") + _field(12, _value("unused", (8, 4)))
    branches = b"".join(
        _field(5, _field(1, name) + _field(6, branch) + _field(20, 5))
        for name in ("then_branch", "else_branch")
    )
    choice = _node("If", ("yes",), "chosen") + branches
    nodes = [_node("MatMul", ("x", "w"), "y"), *{"constant": [constant], "subgraph": [choice]}.get(place, [])]
    inputs: dict[str, Sequence[int | str]] = {"x": ("batch", 8)}
    if place == "subgraph":
        inputs["yes"] = ()
    outer = _external_tensor("w", weights, location, 0, tag_bits)
    tensor = outer if place == "weights" else _tensor("w", weights)
    model = _model(nodes, [tensor], inputs, {"y": ("batch", 4)}, {"yes": 9})
    if place not in ("function", "default"):
        return model
    reference = _field(5, _field(1, "value") + _field(20, 4) + _field(21, "given"))
    default = _field(1, "given") + _field(5, outside) + _field(20, 4)
    inner = constant if place == "function" else _node("Constant", (), "unused") + reference
    body = _field(1, "Unused") + _field(5, "unused") + _field(7, inner) + _field(10, "local")
    body += _field(11, default) if place == "default" else b""
    return model + _field(25, body + _field(9, _field(1, "") + _field(2, OPSET)))
