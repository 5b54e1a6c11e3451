"""A vision transformer in the published size: ViT base, patches of 16 × 16 pixels."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from bench.exported.exportable import Exportable, floats
from bench.exported.seeding import enliven_constants


class _Vit(nn.Module):
    """Class scores of images."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(ViTConfig(attn_implementation="eager", num_labels=1000))

    def forward(self, pixel_values: Any) -> Any:
        return self.vit(pixel_values=pixel_values).logits


def _build_vit() -> Any:
    module = _Vit().eval()
    enliven_constants(module)
    return module


VIT_BASE = Exportable(
    _build_vit,
    inputs=(floats("pixel_values", ("batch", 3, 224, 224)),),
    outputs=("logits",),
    sizes=({"batch": 1}, {"batch": 4}),
    example={"batch": 2},
)
"""ViT base, 86 M parameters: 12 layers of 768 over 196 patches and a class token."""
