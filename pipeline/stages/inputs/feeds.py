"""Seeded inputs that respect what a model and its spec say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pipeline.measuring.feeds import draw_feed, generator
from pipeline.runtime.element_types import Array
from pipeline.spec.models import Input, ModelSpec
from pipeline.stages.results import ModelInterface

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""One shape per input, by name."""


def build_feeds(interface: ModelInterface, shapes: Shapes, spec: ModelSpec, *, seed: int) -> dict[str, Array]:
    """Makes one input for a model.

    Each array depends on the seed and its own name, shape and declaration only, so that adding an input to a
    model changes no other. What is drawn where nothing is declared: `pipeline.measuring.feeds`.

    Args:
        interface: Which inputs there are.
        shapes: The shape of each.
        spec: Their declared ranges and values.
        seed: Of the generators.

    Returns:
        Arrays by input name, in the model's order.

    Raises:
        SpecError: A string input has no `values`.
    """
    nothing = Input()
    feeds = {}
    for tensor in interface.inputs:
        declared = spec.inputs.get(tensor.name, nothing)
        feeds[tensor.name] = draw_feed(
            tensor,
            shapes[tensor.name],
            generator(seed, tensor.name),
            span=declared.range,
            values=declared.values,
            bound=interface.index_bounds.get(tensor.name),
        )
    return feeds
