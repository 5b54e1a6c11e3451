"""Does a spec fit its model? Answered before any long work, with every problem at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from ortprep.bundle.model_facts import ModelInterface
from ortprep.errors import SpecError, propose
from ortprep.quoting import quoted
from ortprep.spec.models import InputSpec, ModelSpec
from ortprep.spec.yaml_text import MAX_REPORTED
from ortprep.stages.core.sample_files import (
    check_sample_files,
    find_sample_files,
)

Shape = tuple[int, ...]

INTEGER_RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "bool": (0, 1),
}
"""Lowest and highest value of every integer type, by the type's name."""
_LARGEST_FLOATS = {"float16": 65504.0, "float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38}
_RANGES: Mapping[str, tuple[float, float]] = {
    **INTEGER_RANGES,
    **{name: (-largest, largest) for name, largest in _LARGEST_FLOATS.items()},
}

MIN_AUTO_SAMPLES = 2
"""Minimum number of real inputs for `convert.precision: auto`."""

MAX_ELEMENTS = 2**30
"""Most elements that all inputs of one run may have: each is drawn, and takes up to 12 bytes meanwhile."""

_MAX_PROPOSALS = 20
"""Number of unknown names that are each compared with all known ones: that takes a while."""

_SHOWN_CHARACTERS = 500
"""Number of characters that are shown of each end of a problem: a model's names may be of any length."""


def require_fit(spec: ModelSpec, interface: ModelInterface) -> None:
    """Checks that a spec and its samples fit a model, by the headers of all samples.

    `fetch` does so before it fetches weights. Later stages do so again: a changed spec does not fetch a model
    again.

    Raises:
        SpecError: They do not fit; the message lists every problem, the first 200 at most.
    """
    problems = _list_first(chain(find_misfits(spec, interface), check_sample_files(spec, interface)))
    problems = problems or tuple(_sample_count_problems(spec))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise SpecError(
            f"spec does not fit its model: {spec.name}, {spec.place}\n{lines}",
            hint=f"correct the entries named above in {quoted(spec.place)}, "
            f"then ortprep prepare {quoted(spec.name)}",
        )


def _list_first(problems: Iterable[str]) -> tuple[str, ...]:
    """Returns the first problems, the long ones without their middle; the others are not even made."""
    found = [_cut(problem) for problem in islice(problems, MAX_REPORTED + 1)]
    if len(found) > MAX_REPORTED:
        found[-1] = "more problems, which are not listed"
    return tuple(found)


def _cut(problem: str) -> str:
    is_long = len(problem) > 2 * _SHOWN_CHARACTERS + 3
    return f"{problem[:_SHOWN_CHARACTERS]} … {problem[-_SHOWN_CHARACTERS:]}" if is_long else problem


def _sample_count_problems(spec: ModelSpec) -> Iterator[str]:
    """Yields the problem of a spec with too few samples to calibrate and judge int8."""
    if spec.convert is None or not spec.convert.is_auto or spec.targets == ("cuda",):
        return
    count = len(find_sample_files(spec))
    if count < MIN_AUTO_SAMPLES:
        yield (
            f"samples: expected at least {MIN_AUTO_SAMPLES} real inputs for convert.precision: auto, "
            f"half of them to calibrate and the others to judge, got {count}"
        )


def find_misfits(spec: ModelSpec, interface: ModelInterface) -> tuple[str, ...]:
    """Returns every way in which a spec contradicts its model, the first 200 at most; nothing if it fits."""
    inputs, outputs = ([item.name for item in items] for items in (interface.inputs, interface.outputs))
    gated = () if spec.convert is None else spec.convert.gate.outputs
    return _list_first(
        chain(
            unsupported_tensors(interface),
            _unknown_names("inputs", spec.inputs, inputs),
            _unknown_names("verify.outputs", spec.verify.outputs, outputs),
            _unknown_names("convert.gate.outputs", gated, outputs),
            _input_problems(spec, interface),
            _set_problems(spec, interface),
        )
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


def unsupported_tensors(interface: ModelInterface) -> Iterator[str]:
    """Yields the inputs and outputs that are no tensors."""
    for kind, items in (("input", interface.inputs), ("output", interface.outputs)):
        for item in items:
            if "(" in item.dtype:
                got = item.dtype
                if kind == "output" and "map(" in got:
                    got += "; `source: {drop_zip_map: true}` makes a matrix of what a ZipMap returns"
                yield f"{kind} {item.name!r} of the model: not supported, expected a tensor, got {got}"


def _unknown_names(section: str, names: Iterable[str], known_names: list[str]) -> Iterator[str]:
    known = frozenset(known_names)
    unknown = [name for name in names if name not in known]
    for name in unknown[:_MAX_PROPOSALS]:
        yield f"{section}.{name}: not in the model; {propose(name, known_names)}"
    if len(unknown) > _MAX_PROPOSALS:
        yield f"{section}: {len(unknown) - _MAX_PROPOSALS} more names are not in the model"


def _input_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields what is wrong with the declaration of each input that is a tensor."""
    for item in interface.inputs:
        if "(" in item.dtype:
            continue
        declared = spec.inputs.get(item.name, InputSpec())
        for index, shape in enumerate(declared.shapes):
            if item.shape is not None and not item.fits(shape):
                expected = f"expected {_show_shape(item.shape)}, got {list(shape)}"
                yield f"inputs.{item.name}.shapes[{index}]: {expected}"
        bound = interface.index_bounds.get(item.name)
        for problem in _value_problems(item.dtype, declared, bound):
            yield f"inputs.{item.name}.{problem}"


def _show_shape(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('?' if axis is None else str(axis) for axis in shape)}]"


def _value_problems(dtype: str, declared: InputSpec, bound: int | None) -> Iterator[str]:
    """Yields what keeps a range or values from being an input's; `bound` is that of its indices."""
    ends, values = declared.range or (), declared.values or ()
    if dtype == "string" and not values:
        yield "values: missing, expected the strings to send, since the input is of type string"
    limits = _RANGES.get(dtype)
    expected = dtype if limits is None else f"{dtype} within [{limits[0]:g}, {limits[1]:g}]"
    for key, chosen in (("range", ends), ("values", values)):
        for value in chosen:
            if not _fits_type(dtype, value, is_exact=key == "values"):
                yield f"{key}: expected {expected}, got {value!r}"
        # Seeded indices stay below the bound, so a range needs to begin below it.
        for value in chosen[:1] if key == "range" else chosen:
            if bound is not None and not isinstance(value, str) and value >= bound:
                yield f"{key}: expected indices below {bound}, as many as the input indexes, got {value!r}"
    if ends and dtype in INTEGER_RANGES and math.ceil(ends[0]) > math.floor(ends[1]):
        yield f"range: expected at least one integer in it, got {list(ends)}"


def _fits_type(dtype: str, value: str | float, *, is_exact: bool) -> bool:
    """Returns whether a type has a value; ends of a range of integers need not be integers themselves."""
    if dtype == "string" or isinstance(value, str):
        return dtype == "string" and isinstance(value, str)
    low, high = _RANGES.get(dtype, (-math.inf, math.inf))
    if not low <= value <= high or (isinstance(value, bool) and dtype != "bool"):
        return False
    return not is_exact or dtype not in INTEGER_RANGES or value == int(value)


def _set_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields what keeps the declared shapes from being sets: their counts, clashes, and sizes left open."""
    several = {name: len(s) for name, s in _declared(spec, interface).items() if len(s) > 1}
    if len(set(several.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in several.items())
        yield f"inputs: expected the same number of shapes for each input, or one, got {listed}"
        return
    incomplete: set[str] = set()
    for index, (filled, uses) in enumerate(_sets(spec, interface)):
        known_shapes = [[size for size in shape or () if isinstance(size, int)] for shape in filled.values()]
        if sum(map(math.prod, known_shapes)) > MAX_ELEMENTS:
            yield f"inputs: expected up to {MAX_ELEMENTS} elements of all inputs in shapes[{index}], got more"
        for symbol, sizes in uses.items():
            if len({size for _, size in sizes}) > 1:
                listed = ", ".join(f"{size} in {name}" for name, size in sizes)
                yield f"inputs: expected one size of {symbol!r} in shapes[{index}], got {listed}"
        for item in interface.inputs:
            shape = filled[item.name]
            is_known = shape is not None and all(isinstance(size, int) for size in shape)
            if "(" not in item.dtype and not is_known and item.name not in incomplete:
                incomplete.add(item.name)
                known = "no rank for it" if item.shape is None else _show_shape(item.shape)
                what = f"missing, expected at least one, since the model has {known}"
                yield f"inputs.{item.name}.shapes: {what}"
