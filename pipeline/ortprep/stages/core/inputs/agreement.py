"""Does a spec fit its model? Answered before any long work, with every problem at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import propose
from ortprep.spec.models import InputSpec, ModelSpec
from ortprep.stages.core.results import ModelInterface

Shape = tuple[int, ...]

INTEGER_RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (4, 8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (4, 8, 16, 32, 64)},
    "bool": (0, 1),
}
"""Lowest and highest value of every integer type, by the type's name."""
_LARGEST_FLOATS = {"float16": 65504.0, "float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38}


def check_agreement(spec: ModelSpec, interface: ModelInterface) -> tuple[str, ...]:
    """Returns every way in which a spec contradicts its model; nothing if it fits."""
    inputs, outputs = ([item.name for item in items] for items in (interface.inputs, interface.outputs))
    gated = () if spec.convert is None else spec.convert.gate.outputs
    return (
        *_unsupported(interface),
        *_unknown_names("inputs", spec.inputs, inputs),
        *_unknown_names("verify.outputs", spec.verify.outputs, outputs),
        *_unknown_names("convert.gate.outputs", gated, outputs),
        *_input_problems(spec, interface),
        *dict.fromkeys(_set_problems(spec, interface)),
    )


def shape_sets(spec: ModelSpec, interface: ModelInterface) -> tuple[Mapping[str, Shape], ...]:
    """Returns the shapes that are verified and measured: the k-th of every input together.

    An input with one shape is used with all shapes of the others. What the spec leaves out comes from the
    model: fixed sizes, and symbolic ones that another input of the same set settles.

    Returns:
        At least one set, the primary one first; each maps every input's name to its shape.
    """
    return tuple(
        {name: tuple(size for size in shape or () if isinstance(size, int)) for name, shape in filled.items()}
        for filled, _ in _sets(spec, interface)
    )


_Filled = dict[str, tuple[int | str | None, ...] | None]
_Uses = dict[str, list[tuple[str, int]]]


def _sets(spec: ModelSpec, interface: ModelInterface) -> Iterator[tuple[_Filled, _Uses]]:
    """Yields each set's shapes, as far as they are known, and what is declared of each symbolic size."""
    declared = _declared(spec, interface)
    for index in range(max([1, *map(len, declared.values())])):
        chosen = {
            name: shapes[0] if len(shapes) == 1 else next(iter(shapes[index : index + 1]), None)
            for name, shapes in declared.items()
        }
        uses: _Uses = {}
        for item in interface.inputs:
            for axis, size in zip(item.shape or (), chosen[item.name] or (), strict=False):
                if isinstance(axis, str):
                    uses.setdefault(axis, []).append((item.name, size))
        filled: _Filled = {
            item.name: tuple(uses[axis][0][1] if axis in uses else axis for axis in item.shape)
            if chosen[item.name] is None and item.shape is not None
            else chosen[item.name]
            for item in interface.inputs
        }
        yield filled, uses


def _declared(spec: ModelSpec, interface: ModelInterface) -> dict[str, tuple[Shape, ...]]:
    return {item.name: spec.inputs.get(item.name, InputSpec()).shapes for item in interface.inputs}


def _unsupported(interface: ModelInterface) -> Iterator[str]:
    for kind, items in (("input", interface.inputs), ("output", interface.outputs)):
        for item in items:
            if "(" in item.dtype:
                yield f"{kind} {item.name!r} of the model: not supported, expected a tensor, got {item.dtype}"


def _unknown_names(section: str, names: Iterable[str], known_names: list[str]) -> Iterator[str]:
    for name in names:
        if name not in known_names:
            yield f"{section}.{name}: not in the model; {propose(name, known_names)}"


def _input_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    for item in interface.inputs:
        input_spec = spec.inputs.get(item.name, InputSpec())
        if "(" in item.dtype:
            continue
        for index, shape in enumerate(input_spec.shapes):
            if item.shape is None or fits_shape(item, shape):
                continue
            wrong = f" (rank {len(item.shape)}, not {len(shape)})" if len(shape) != len(item.shape) else ""
            expected = f"expected {_show_shape(item.shape)}, got {list(shape)}{wrong}"
            yield f"inputs.{item.name}.shapes[{index}]: {expected}"
        yield from _value_problems(item, input_spec, interface.index_bounds.get(item.name))


def fits_shape(item: TensorSpec, shape: Shape) -> bool:
    """Returns whether an input takes an array of a shape."""
    if item.shape is None:
        return True
    fixed = zip(item.shape, shape, strict=False)
    return len(item.shape) == len(shape) and all(
        not isinstance(axis, int) or axis == size for axis, size in fixed
    )


def _show_shape(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('?' if axis is None else str(axis) for axis in shape)}]"


def _value_problems(item: TensorSpec, input_spec: InputSpec, bound: int | None) -> Iterator[str]:
    where = f"inputs.{item.name}"
    if item.dtype == "string" and input_spec.values is None:
        yield f"{where}.values: missing, expected the strings to send, since the input is of type string"
    if item.dtype == "string" and input_spec.range is not None:
        yield f"{where}.range: expected none, since the input is of type string"
    elif input_spec.range is not None:
        yield from (f"{where}.range: {text}" for text in _range_problems(item.dtype, input_spec.range, bound))
    for value in input_spec.values or ():
        problem = _value_problem(item.dtype, value, bound)
        if problem is not None:
            yield f"{where}.values: {problem}"


def _range_problems(dtype: str, ends: tuple[float, float], bound: int | None) -> Iterator[str]:
    low, high = ends
    if dtype in INTEGER_RANGES:
        least, most = INTEGER_RANGES[dtype]
        if low < least or high > most:
            yield f"expected within [{least}, {most}] of {dtype}, got [{low:g}, {high:g}]"
        elif math.ceil(low) > math.floor(high):
            yield f"expected at least one integer in it, got [{low:g}, {high:g}]"
    elif max(abs(low), abs(high)) > _LARGEST_FLOATS.get(dtype, math.inf):
        yield f"expected within ±{_LARGEST_FLOATS[dtype]:g} of {dtype}, got [{low:g}, {high:g}]"
    if bound is not None and low >= bound:
        yield f"expected indices below {bound}, the size of what the input indexes, got [{low:g}, {high:g}]"


def _value_problem(dtype: str, value: str | int | float | bool, bound: int | None) -> str | None:
    wrong = f"expected {dtype}, got {value!r}"
    if dtype == "string" or isinstance(value, str):
        return None if dtype == "string" and isinstance(value, str) else wrong
    if dtype in INTEGER_RANGES:
        least, most = INTEGER_RANGES[dtype]
        if value != int(value) or (isinstance(value, bool) and dtype != "bool"):
            return wrong
        if not least <= value <= most:
            return f"{wrong}, outside [{least}, {most}]"
        if bound is not None and value >= bound:
            return f"expected indices below {bound}, the size of what the input indexes, got {value!r}"
        return None
    too_large = abs(value) > _LARGEST_FLOATS.get(dtype, math.inf)
    return wrong if isinstance(value, bool) or too_large else None


def _set_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields what keeps the declared shapes from being sets: their counts, clashes, and sizes left open."""
    several = {name: len(s) for name, s in _declared(spec, interface).items() if len(s) > 1}
    if len(set(several.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in several.items())
        yield f"inputs: expected the same number of shapes for each input, or one, got {listed}"
        return
    for index, (filled, uses) in enumerate(_sets(spec, interface)):
        for symbol, sizes in uses.items():
            if len({size for _, size in sizes}) > 1:
                listed = ", ".join(f"{size} in {name}" for name, size in sizes)
                yield f"inputs: expected one size of {symbol!r} in shapes[{index}], got {listed}"
        for item in interface.inputs:
            shape = filled[item.name]
            if "(" not in item.dtype and (shape is None or not all(isinstance(size, int) for size in shape)):
                known = "no rank for it" if item.shape is None else _show_shape(item.shape)
                what = f"missing, expected at least one, since the model has {known}"
                yield f"inputs.{item.name}.shapes: {what}"
