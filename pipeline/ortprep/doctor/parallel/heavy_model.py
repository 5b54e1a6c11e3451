"""A model large enough that its load, its initialisation and its runs can be watched.

Written without the onnx package, which a runtime job does not have; field numbers are those of `onnx.proto3`.
The weights are holes in the file: they take no room and no time to write, and are parsed like any others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ortprep.bundle.onnx_wire import encode_varint, write_graph_field, write_tensor_field
from ortprep.runtime.tensors.arrays import write_tensors

LAYERS = 12
SIZE = 2048
ROWS = 96
_WEIGHT_BYTES = SIZE * SIZE * 4
WEIGHTS_BYTES = LAYERS * _WEIGHT_BYTES
"""192 MiB: on one core of 2024, some 50 ms to parse, 250 to initialise, 150 a run."""

_IR_VERSION, _OPSET, _FLOAT = 8, 17, 1


def write_heavy_model(folder: Path) -> tuple[Path, Path]:
    """Writes a chain of matrix products with inline weights, and a sample of its input.

    Returns:
        The model's file and the sample's.
    """
    model, sample = folder / "heavy.onnx", folder / "heavy.npz"
    heads = [_weight_head(f"w{layer}") for layer in range(LAYERS)]
    nodes = [_field(1, _node(f"x{layer}", f"w{layer}", f"x{layer + 1}")) for layer in range(LAYERS)]
    rest = b"".join(nodes) + _field(2, b"heavy") + _field(11, _value("x0")) + _field(12, _value(f"x{LAYERS}"))
    with model.open("wb") as file:
        file.write(_number(1, _IR_VERSION) + _field(8, _number(2, _OPSET)))
        file.write(write_graph_field(len(rest) + sum(map(len, heads)) + WEIGHTS_BYTES) + rest)
        for head in heads:
            file.write(head)
            file.seek(_WEIGHT_BYTES, 1)
        file.truncate()
    write_tensors(sample, {"x0": np.zeros((ROWS, SIZE), np.float32)})
    return model, sample


def _weight_head(name: str) -> bytes:
    """Returns an initializer's field without its values, which come last."""
    header = _number(1, SIZE) * 2 + _number(2, _FLOAT) + _field(8, name.encode())
    return write_tensor_field(header=header, values_bytes=_WEIGHT_BYTES)


def _node(data: str, weight: str, output: str) -> bytes:
    names = _field(1, data.encode()) + _field(1, weight.encode()) + _field(2, output.encode())
    return names + _field(4, b"MatMul")


def _value(name: str) -> bytes:
    shape = _field(1, _number(1, ROWS)) + _field(1, _number(1, SIZE))
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, _FLOAT) + _field(2, shape)))


def _number(field: int, value: int) -> bytes:
    return encode_varint(field << 3) + encode_varint(value)


def _field(field: int, data: bytes) -> bytes:
    return encode_varint(field << 3 | 2) + encode_varint(len(data)) + data
