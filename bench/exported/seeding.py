"""Random weights that keep the standard deviation of every layer's activations near one."""

from __future__ import annotations

from typing import Any

import torch

CONSTANT_NOISE = 0.05
"""Standard deviation of what is added to parameters that an architecture starts as zeros or ones."""

MEAN_NOISE, SCALE_NOISE = 0.1, 0.2
"""How far statistics are from those of the calibrating batch: in standard deviations; of the logarithm."""


def enliven_constants(module: Any) -> None:
    """Adds noise to biases of zeros and gains of ones.

    The exporter shares equal initializers and folds neutral ones; a trained model has neither.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=CONSTANT_NOISE)


def calibrate_norms(module: Any, *batch: Any) -> None:
    """Sets the running statistics of every BatchNorm to those of a batch, and then somewhat off.

    Args:
        module: Left in evaluation mode.
        batch: One tensor per input.
    """
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the statistics of what is seen, not a moving average
    with torch.no_grad():
        module.train()(*batch)
        for norm in norms:
            deviation = norm.running_var.sqrt()
            norm.running_mean.add_(MEAN_NOISE * deviation * torch.randn_like(deviation))
            norm.running_var.mul_(torch.exp(SCALE_NOISE * torch.randn_like(deviation)))
    module.eval()
