"""The spec that goes with an exported model."""

from __future__ import annotations

from bench.exported.exportable import Exportable, Input, Sizes

_HEADER = """\
# {name}, exported by PyTorch with seeded weights: `python -m bench.exported --out FOLDER {name}`.
name: {name}
source: {{path: ../{name}.onnx}}

inputs:
"""


def spec_text(name: str, model: Exportable) -> str:
    """Writes a spec for `FOLDER/configs/NAME.yaml`, the model being `FOLDER/NAME.onnx`."""
    lines = [_input_line(declared, model.sizes) for declared in model.inputs]
    return _HEADER.format(name=name) + "\n".join(lines) + "\n"


def _input_line(declared: Input, sizes: tuple[Sizes, ...]) -> str:
    shapes = [list(declared.shape(one)) for one in sizes]
    low, high = (_number(declared, end) for end in (declared.low, declared.high))
    drawn = f"values: [{low}]" if low == high else f"range: [{low}, {high}]"
    return f"  {declared.name}: {{shapes: {shapes}, {drawn}}}"


def _number(declared: Input, value: float) -> str:
    return str(int(value) if declared.dtype == "int64" else value)
