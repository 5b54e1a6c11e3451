"""U-Net (Ronneberger et al. 2015) with padded convolutions and BatchNorm: transposed convolutions, skips."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.exported.exportable import Exportable, floats
from bench.exported.seeding import calibrate_norms, enliven_constants

WIDTHS = (48, 96, 192, 384, 768)
"""Channels at each resolution, the finest first."""


class _Twice(nn.Sequential):
    """Two 3 × 3 convolutions, each normalised and rectified."""

    def __init__(self, inward: int, outward: int) -> None:
        parts = []
        for channels in (inward, outward):
            conv = nn.Conv2d(channels, outward, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            parts += [conv, nn.BatchNorm2d(outward), nn.ReLU()]
        super().__init__(*parts)


class _Unet(nn.Module):
    """Class scores of every pixel."""

    def __init__(self, *, channels: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _Twice(above, here) for above, here in zip((channels, *WIDTHS), WIDTHS, strict=False)
        )
        steps = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for below, here in steps)
        self.up = nn.ModuleList(_Twice(2 * here, here) for _, here in steps)
        self.head = nn.Conv2d(WIDTHS[0], classes, 1)

    def forward(self, image: Any) -> Any:
        x, skipped = self.down[0](image), []
        for down in self.down[1:]:
            skipped.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skipped.pop(), grow(x)], dim=1))
        return self.head(x)


def _build_unet() -> Any:
    module = _Unet()
    enliven_constants(module)
    calibrate_norms(module, torch.rand(4, 3, 128, 128))
    return module


UNET = Exportable(
    _build_unet,
    inputs=(floats("image", ("batch", 3, 128, 128), low=0.0),),
    outputs=("mask_scores",),
    sizes=({"batch": 1}, {"batch": 2}),
    example={"batch": 2},
)
"""U-Net of five resolutions, 17 M parameters."""
