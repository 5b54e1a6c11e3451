"""Do the sizes that a spec binds fit its model, and the shapes it declares? Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from pipeline.bundle.loader_config import TensorSpec
from pipeline.errors import StageError
from pipeline.spec.models import ModelSpec
from pipeline.stages.convert.passes.shapes import resolve_dimensions
from pipeline.stages.inputs.agreement import shape_sets
from pipeline.stages.inputs.sample_files import fits_shape
from pipeline.stages.results import ModelInterface


def find_binding_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields what is wrong with `convert.shapes`, of a spec that agrees with its model otherwise.

    Args:
        spec: What the user wrote.
        interface: What the model has.
    """
    if spec.convert is None:
        return
    for binding in filter(None, (spec.convert.binding, *spec.convert.buckets)):
        try:
            sizes = resolve_dimensions(interface.inputs, binding)
        except StageError as error:
            yield f"convert.shapes: {error.message}"
            continue
        inputs = [_bind(item, sizes) for item in interface.inputs]
        # Real samples have shapes of their own, which are read with them.
        if spec.samples is None and not _is_declared(spec, interface, inputs):
            shown = ", ".join(f"{item.name} {list(item.shape or ())}" for item in inputs)
            yield f"convert.shapes: expected declared shapes of inputs that fit {shown}, got none"


def _bind(item: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    shape = tuple(
        axis if isinstance(axis, int) else sizes.get(axis or f"{item.name}[{position}]", axis)
        for position, axis in enumerate(item.shape or ())
    )
    return item if item.shape is None else dataclasses.replace(item, shape=shape)


def _is_declared(spec: ModelSpec, interface: ModelInterface, inputs: list[TensorSpec]) -> bool:
    return any(
        all(fits_shape(item, shapes[item.name]) for item in inputs) for shapes in shape_sets(spec, interface)
    )
