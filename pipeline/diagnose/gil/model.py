"""A model that is large enough for its load, its initialisation and its runs to be watched.

Written field by field, as `onnx.proto3` numbers them: what watches has no onnx package. The weights are holes
in the file: it takes no room and no time to write, and is parsed like any other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.runtime.tensors import write_tensors

LAYERS = 12
SIZE = 2048
ROWS = 96
WEIGHTS_BYTES = LAYERS * SIZE * SIZE * 4
"""192 MiB: on one core of 2024, some 50 ms to parse, 250 to initialise, 150 a run."""

_IR_VERSION, _OPSET, _FLOAT = 8, 17, 1
_VARINT, _LENGTH = 0, 2


def write_heavy_model(folder: Path) -> tuple[Path, Path]:
    """Writes a chain of matrix products with inline weights, and a sample of its input.

    Args:
        folder: Exists.

    Returns:
        The model's file and the sample's.
    """
    model, sample = folder / "heavy.onnx", folder / "heavy.npz"
    weights_bytes = SIZE * SIZE * 4
    heads = [_weights_head(f"w{layer}", weights_bytes) for layer in range(LAYERS)]
    rest = b"".join(
        [
            *(_field(1, _node(f"x{layer}", f"w{layer}", f"x{layer + 1}")) for layer in range(LAYERS)),
            _field(2, b"heavy"),
            _field(11, _value("x0")),
            _field(12, _value(f"x{LAYERS}")),
        ]
    )
    size_bytes = len(rest) + sum(len(head) + weights_bytes for head in heads)
    with model.open("wb") as file:
        file.write(_number(1, _IR_VERSION) + _field(8, _number(2, _OPSET)))
        file.write(_varint(7 << 3 | _LENGTH) + _varint(size_bytes) + rest)
        for head in heads:
            file.write(head)
            file.seek(weights_bytes, 1)
        file.truncate()
    write_tensors(sample, {"x0": np.zeros((ROWS, SIZE), np.float32)})
    return model, sample


def _weights_head(name: str, size_bytes: int) -> bytes:
    """Returns all of an initializer's field but its values, which come last."""
    tensor = (
        _number(1, SIZE) * 2
        + _number(2, _FLOAT)
        + _field(8, name.encode())
        + _varint(9 << 3 | _LENGTH)
        + _varint(size_bytes)
    )
    return _varint(5 << 3 | _LENGTH) + _varint(len(tensor) + size_bytes) + tensor


def _node(data: str, weights: str, output: str) -> bytes:
    return (
        _field(1, data.encode())
        + _field(1, weights.encode())
        + _field(2, output.encode())
        + _field(4, b"MatMul")
    )


def _value(name: str) -> bytes:
    shape = _field(1, _number(1, ROWS)) + _field(1, _number(1, SIZE))
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, _FLOAT) + _field(2, shape)))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(data)) + data
