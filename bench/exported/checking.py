"""Checks that ONNX Runtime gives PyTorch's answers, and that the answers show what a conversion breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from bench.exported.drawing import draw_tensors
from bench.exported.exportable import Exportable, Sizes

TOLERANCE = 1e-3
"""How far ONNX Runtime may be from PyTorch, relative to an output's standard deviation."""

LEAST_STD, MOST_STD = 1e-3, 1e3
"""What an output's standard deviation must be within."""


def check_answers(name: str, module: Any, model: Exportable, path: Path) -> None:
    """Runs an exported model on two inputs per declared set of sizes.

    Raises:
        SystemExit: ONNX Runtime answers otherwise than PyTorch, or the answers are not finite, of a strange
            magnitude, or the same for every input.
    """
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for sizes in model.sizes:
        answers = [_compared(name, module, model, session, sizes, seed=seed) for seed in (1, 2)]
        for output, one, other in zip(model.outputs, *answers, strict=True):
            problem = _degenerate(one, other)
            if problem:
                raise SystemExit(f"degenerate output: {name}, {output}\n  {problem}")


def _compared(
    name: str, module: Any, model: Exportable, session: Any, sizes: Sizes, *, seed: int
) -> Sequence[NDArray[Any]]:
    """Returns PyTorch's answers, once ONNX Runtime has given them too."""
    tensors = draw_tensors(model, sizes, seed=seed)
    with torch.no_grad():
        answer = module(*tensors)
    expected = [part.numpy() for part in (answer if isinstance(answer, tuple) else (answer,))]
    names = [declared.name for declared in model.inputs]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    for output, one, other in zip(model.outputs, expected, session.run(None, feeds), strict=True):
        # A difference that is no number is too large as well.
        if not np.abs(one - other).max() <= TOLERANCE * one.std():
            raise SystemExit(
                f"wrong answer: {name}, {output}\n  expected ONNX Runtime within {TOLERANCE:g} "
                f"standard deviations of PyTorch, got {np.abs(one - other).max() / one.std():.3g}"
            )
    return expected


def _degenerate(one: NDArray[Any], other: NDArray[Any]) -> str | None:
    std = float(one.std())
    if not LEAST_STD <= std <= MOST_STD:
        return f"expected a standard deviation from {LEAST_STD:g} to {MOST_STD:g}, got {std:.3g}"
    change = float(np.abs(one - other).max())
    if change < LEAST_STD * std:
        return f"expected another answer for another input, got one {change / std:.3g} deviations off"
    return None
