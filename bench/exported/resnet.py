"""ResNet-50 (He et al. 2015), striding in the 3 × 3 convolutions as later implementations do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.exported.exportable import Exportable, floats
from bench.exported.seeding import calibrate_norms, enliven_constants

BLOCKS = (3, 4, 6, 3)
"""Blocks per stage; a stage halves the image (the first one excepted) and doubles the channels."""

EXPANSION = 4
"""Channels that leave a block, per channel of its 3 × 3 convolution."""


def _conv_norm(inward: int, outward: int, *, side: int, stride: int = 1) -> Any:
    conv = nn.Conv2d(inward, outward, side, stride=stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outward))


class _Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    def __init__(self, inward: int, width: int, *, stride: int) -> None:
        super().__init__()
        outward = width * EXPANSION
        self.reduce = _conv_norm(inward, width, side=1)
        self.spread = _conv_norm(width, width, side=3, stride=stride)
        self.expand = _conv_norm(width, outward, side=1)
        same = stride == 1 and inward == outward
        self.shortcut = nn.Identity() if same else _conv_norm(inward, outward, side=1, stride=stride)

    def forward(self, x: Any) -> Any:
        inner = torch.relu(self.spread(torch.relu(self.reduce(x))))
        return torch.relu(self.expand(inner) + self.shortcut(x))


class _ResNet(nn.Module):
    """Class scores of images."""

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(3, 64, side=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inward = [], 64
        for stage, count in enumerate(BLOCKS):
            width = 64 << stage
            for index in range(count):
                blocks.append(_Bottleneck(inward, width, stride=2 if stage and not index else 1))
                inward = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inward, classes))

    def forward(self, image: Any) -> Any:
        return self.head(self.blocks(self.stem(image)))


def _build_resnet() -> Any:
    module = _ResNet()
    enliven_constants(module)
    calibrate_norms(module, torch.rand(8, 3, 224, 224))
    return module


RESNET50 = Exportable(
    _build_resnet,
    inputs=(floats("image", ("batch", 3, 224, 224), low=0.0),),
    outputs=("scores",),
    sizes=({"batch": 1}, {"batch": 4}),
    example={"batch": 2},
)
"""ResNet-50, 26 M parameters."""
