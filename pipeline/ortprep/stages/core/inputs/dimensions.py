"""Symbolic dimensions of a model's inputs: their names, and the sizes that a spec binds them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import StageError
from ortprep.quoting import quoted


def resolve_dimensions(inputs: tuple[TensorSpec, ...], dimensions: Mapping[str, int]) -> dict[str, int]:
    """Returns sizes by the names of symbolic dimensions, and by `INPUT[AXIS]` only where there is no name.

    Raises:
        StageError: The model has no such dimension, a size is below 1, or a dimension has two.
    """
    called = {name for spec in inputs for name in _symbols(spec) if name is not None}
    axes = {
        f"{spec.name}[{axis}]": name
        for spec in inputs
        for axis, name in enumerate(_symbols(spec))
        if name is not None
    }
    bound: dict[str, int] = {}
    for key, size in dimensions.items():
        name = key if key in called else axes.get(key)
        if name is None:
            raise _unknown(key, size, inputs)
        if size < 1 or bound.get(name, size) != size:
            expected = "a size of 1 or more" if size < 1 else f"{bound[name]}, as for {name}"
            raise StageError(
                f"dimension cannot be bound: {key}\n  expected {expected}, got {size}",
                hint=f"shapes: {{{quoted(name)}: {max(bound.get(name, size), 1):d}}}",
            )
        bound[name] = size
    return bound


def _symbols(spec: TensorSpec) -> Iterator[str | None]:
    """Yields the name of each axis without a size, None for an axis with one."""
    for axis, size in enumerate(spec.shape or ()):
        yield None if isinstance(size, int) else size or f"{spec.name}[{axis}]"


def _unknown(key: str, size: int, inputs: tuple[TensorSpec, ...]) -> StageError:
    called = list(dict.fromkeys(name for spec in inputs for name in _symbols(spec) if name is not None))
    shapes = ", ".join(f"{spec.name} {list(spec.shape or ())}" for spec in inputs)
    if not called:
        return StageError(
            f"model has no symbolic dimension {key!r}\n  expected inputs with one, got {shapes}",
            hint="shapes: {}",
        )
    return StageError(
        f"model has no symbolic dimension {key!r}\n  expected one of {', '.join(called)}, as in {shapes}",
        hint=f"shapes: {{{quoted(called[0])}: {size:d}}}",
    )
