"""Draws inputs for a model. Needs PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from bench.exported.exportable import Exportable, Input, Sizes


def draw_tensors(model: Exportable, sizes: Sizes, *, seed: int) -> tuple[Any, ...]:
    """Draws one tensor per input, evenly from its range."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_draw(declared, sizes, generator) for declared in model.inputs)


def _draw(declared: Input, sizes: Sizes, generator: Any) -> Any:
    shape = declared.shape(sizes)
    if declared.dtype == "int64":
        return torch.randint(int(declared.low), int(declared.high) + 1, shape, generator=generator)
    return torch.empty(shape).uniform_(declared.low, declared.high, generator=generator)
