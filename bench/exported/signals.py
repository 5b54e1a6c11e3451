"""Models of signals: a residual net of 1-D convolutions, and a bidirectional LSTM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.exported.exportable import TORCHSCRIPT, Exportable, floats
from bench.exported.seeding import calibrate_norms, enliven_constants

SENSORS, BANDS = 12, 80
"""Channels of the convolutions' signal; features per step of the LSTM."""


def _conv_norm(inward: int, outward: int, *, taps: int, stride: int = 1) -> Any:
    conv = nn.Conv1d(inward, outward, taps, stride=stride, padding=taps // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm1d(outward))


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inward: int, outward: int, *, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm(inward, outward, taps=5, stride=stride)
        self.second = _conv_norm(outward, outward, taps=5)
        same = stride == 1 and inward == outward
        self.shortcut = nn.Identity() if same else _conv_norm(inward, outward, taps=1, stride=stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class _Conv1dNet(nn.Module):
    """Class scores of signals of any length."""

    def __init__(self, *, classes: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(SENSORS, 64, taps=15, stride=2), nn.ReLU())
        widths = (64, 64, 128, 128, 256, 256, 448, 448)
        self.blocks = nn.Sequential(
            *(
                _Residual(inward, outward, stride=1 if inward == outward else 2)
                for inward, outward in zip((64, *widths), widths, strict=False)
            )
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], classes))

    def forward(self, signal: Any) -> Any:
        return self.head(self.blocks(self.stem(signal)))


class _Bilstm(nn.Module):
    """Class scores of every step of a sequence."""

    def __init__(self, *, hidden: int = 320, classes: int = 40) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, features: Any) -> Any:
        states, _ = self.lstm(features)
        return self.head(states)


def _build_conv1d_net() -> Any:
    module = _Conv1dNet()
    enliven_constants(module)
    calibrate_norms(module, 2 * torch.rand(16, SENSORS, 1000) - 1)
    return module


def _build_bilstm() -> Any:
    return _Bilstm().eval()


CONV1D_NET = Exportable(
    _build_conv1d_net,
    inputs=(floats("signal", ("batch", SENSORS, "length")),),
    outputs=("scores",),
    sizes=({"batch": 1, "length": 1000}, {"batch": 8, "length": 500}),
    example={"batch": 2, "length": 96},
)
"""Eight residual blocks over 12 channels of a signal, 5 M parameters."""

BILSTM = Exportable(
    _build_bilstm,
    inputs=(floats("features", ("batch", "sequence", BANDS)),),
    outputs=("scores",),
    sizes=({"batch": 1, "sequence": 100}, {"batch": 4, "sequence": 25}),
    example={"batch": 2, "sequence": 7},
    # The exporter by torch.export writes the example's length into the output's shape.
    exporter=TORCHSCRIPT,
)
"""Two bidirectional LSTM layers over 80 features, 4 M parameters."""
