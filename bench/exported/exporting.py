"""Exports one model with one of PyTorch's exporters, and writes its spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.exported.checking import check_answers
from bench.exported.drawing import draw_tensors
from bench.exported.exportable import TORCHSCRIPT, Exportable, Input
from bench.exported.specs import spec_text

MOST_INLINE_BYTES = 2_000_000_000
"""Weights beyond this go into an external file: a protobuf message holds 2 GiB."""

TORCHSCRIPT_OPSET = 17
"""Of the older exporter, which knows no opset after 20 and is mostly used with those around this one."""


def export_model(name: str, model: Exportable, folder: Path) -> Path:
    """Writes `NAME.onnx` and `configs/NAME.yaml`; returns the model's path.

    Raises:
        SystemExit: The exported model fails `check_answers`.
    """
    torch.manual_seed(0)
    module = model.build()
    path = folder / f"{name}.onnx"
    spec = folder / "configs" / f"{name}.yaml"
    spec.parent.mkdir(parents=True, exist_ok=True)
    _write(module, model, path)
    check_answers(name, module, model, path)
    spec.write_text(spec_text(name, model), encoding="utf-8")
    return path


def _write(module: Any, model: Exportable, path: Path) -> None:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    example = draw_tensors(model, model.example, seed=0)
    names: dict[str, Any] = {
        "input_names": [declared.name for declared in model.inputs],
        "output_names": list(model.outputs),
    }
    if model.exporter == TORCHSCRIPT:
        axes = {declared.name: _dynamic_axes(declared) for declared in model.inputs}
        torch.onnx.export(
            module, example, path, dynamo=False, dynamic_axes=axes, opset_version=TORCHSCRIPT_OPSET, **names
        )
        return
    shapes = _dynamic_shapes(model)
    program = torch.onnx.export(module, example, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    program.save(path, external_data=weights > MOST_INLINE_BYTES)


def _dynamic_shapes(model: Exportable) -> tuple[Any, ...]:
    """Names the dynamic axes as torch.export wants them: a variadic parameter is one tuple."""
    axes = [_dynamic_axes(declared) for declared in model.inputs]
    if model.variadic is None:
        return tuple(axes)
    return (*axes[: model.variadic], tuple(axes[model.variadic :]))


def _dynamic_axes(declared: Input) -> dict[int, str]:
    return {index: axis for index, axis in enumerate(declared.axes) if isinstance(axis, str)}
