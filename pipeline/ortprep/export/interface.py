"""What an exported variant takes and gives: as its session says, or else as its bundle does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec, Variant
from ortprep.export.trial import TrialRun

Interface = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs."""


def resolve_interface(
    config: LoaderConfig, variant: Variant, trial: TrialRun, golden: Mapping[str, tuple[int, ...]]
) -> Interface:
    """Returns inputs and outputs; a server compares them with those of the session it makes.

    Args:
        config: The bundle's loader config, which lists those of the source.
        variant: The variant.
        trial: What its session said, if there was one.
        golden: The golden sample's shapes by input and output name. ONNX Runtime's Python lists a tensor of
            unknown rank as it lists a scalar; the sample tells them apart.
    """
    if trial.missing:
        return (
            tuple(_convert(one, variant) for one in config.inputs),
            tuple(_convert(one, variant) for one in config.outputs),
        )
    inputs = tuple(_without_false_scalar(one, golden) for one in trial.inputs)
    return inputs, tuple(_without_false_scalar(one, golden) for one in trial.outputs)


def _without_false_scalar(spec: TensorSpec, golden: Mapping[str, tuple[int, ...]]) -> TensorSpec:
    is_other = spec.shape == () and golden.get(spec.name, ()) != ()
    return dataclasses.replace(spec, shape=None) if is_other else spec


def _convert(spec: TensorSpec, variant: Variant) -> TensorSpec:
    """Returns a tensor of the source as a converted variant has it."""
    dtype = "float16" if variant.half_io and spec.dtype == "float32" else spec.dtype
    if spec.shape is None:
        return TensorSpec(spec.name, dtype, None)
    return TensorSpec(
        spec.name,
        dtype,
        tuple(
            size if isinstance(size, int) else _bound(variant, spec.name, axis, size)
            for axis, size in enumerate(spec.shape)
        ),
    )


def _bound(variant: Variant, name: str, axis: int, symbol: str | None) -> int | str | None:
    binding = variant.binding
    return binding.get(symbol or "", binding.get(f"{name}[{axis}]")) or symbol
