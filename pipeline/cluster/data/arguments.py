"""The settings of a `PredictorConfig`, compared with the model. Pure functions that raise `PoolError`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.cluster.data.batching import has_shape
from ortprep.errors import InvalidRequestError, PoolError
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs


def check_sizes(argument: str, sizes: Any, *, fixed: int | None, model: str) -> tuple[int, ...]:
    """Returns lengths of batches in order; `fixed` is the only one that the model takes, if there is one."""
    expected = f"{fixed}, which the model fixes" if fixed else "whole numbers from 1"
    asked: list[Any] = list(sizes) if isinstance(sizes, Iterable) else [None]
    is_right = all(isinstance(size, int | np.integer) and size > 0 for size in asked)
    if not is_right or any(isinstance(size, bool) for size in asked) or (fixed and set(asked) != {fixed}):
        raise PoolError(f"bad {argument} of {model}\n  expected {expected}, got {sizes!r}")
    return tuple(sorted({int(size) for size in asked}))


def choose_columns(outputs: Any, names: Sequence[str], *, model: str) -> dict[str, str]:
    """Returns the column of every output that is wanted; None for all, by their names."""
    if isinstance(outputs, str):
        raise PoolError(
            f"bad outputs of {model}\n  expected names, got the text {outputs!r}",
            hint=f"PredictorConfig(outputs=[{outputs!r}])",
        )
    wanted = names if outputs is None else outputs
    columns = dict(wanted) if isinstance(wanted, Mapping) else {name: name for name in wanted}
    unknown = [name for name in columns if name not in names]
    if unknown or not columns:
        raise PoolError(
            f"bad outputs: {model} has no output {unknown[0] if unknown else 'of no name'!r}\n"
            f"  expected some of {', '.join(names)}"
        )
    if len(set(columns.values())) < len(columns):
        raise PoolError(f"bad outputs of {model}\n  expected a column for each, got {columns}")
    return columns


def check_constants(
    constants: Mapping[str, Any], inputs: Mapping[str, TensorSpec], signature: Signature
) -> dict[str, Array]:
    """Returns inputs that are the same for every row, as arrays of their own. Nothing is converted."""
    require_inputs("constants", constants, signature)
    wanted = Signature(signature.model, {name: signature.inputs[name] for name in constants}, {})
    try:
        arrays = check_inputs(wanted, constants)
    except InvalidRequestError as error:
        hint = "constants={INPUT: numpy.asarray(VALUE, TYPE)}"
        raise PoolError(f"bad constants: {error.message}", hint=hint) from None
    for name, array in zip(constants, arrays, strict=True):
        if not has_shape(array, inputs[name]):
            raise PoolError(
                f"bad constants: input {name!r} of {signature.model} is of another shape\n"
                f"  expected {list(inputs[name].shape or ())}, got {list(array.shape)}"
            )
    return {
        name: np.array(array, signature.inputs[name], order="C")
        for name, array in zip(constants, arrays, strict=True)
    }


def choose_sources(
    columns: Mapping[str, str], constants: Collection[str], signature: Signature
) -> dict[str, str]:
    """Returns the column that each input is taken from; constants are taken from none."""
    require_inputs("columns", columns, signature)
    both = [name for name in columns if name in constants]
    taken = {name: columns.get(name, name) for name in signature.inputs if name not in constants}
    if both or not taken:
        got = f"{both[0]!r} as column and as constant" if both else f"constants for all of {signature.model}"
        raise PoolError(
            f"bad constants and columns of {signature.model}\n"
            f"  expected an input of every row and no input twice, got {got}"
        )
    return taken


def require_inputs(argument: str, names: Iterable[str], signature: Signature) -> None:
    """Raises unless a model has inputs of these names."""
    unknown = [name for name in names if name not in signature.inputs]
    if unknown:
        raise PoolError(
            f"bad {argument}: {signature.model} has no input {unknown[0]!r}\n"
            f"  expected some of {', '.join(signature.inputs)}"
        )


def check_keep(keep: bool | Sequence[str], answers: Collection[str]) -> bool | tuple[str, ...]:
    """Returns which columns of a batch are handed on: names that no output has, or whether all are."""
    if isinstance(keep, bool):
        return keep
    taken = [name for name in keep if name in answers]
    if isinstance(keep, str) or taken:
        got = f"the text {keep!r}" if isinstance(keep, str) else f"{taken[0]!r}, which an output is called"
        raise PoolError(f"bad keep\n  expected True or names of other columns than outputs', got {got}")
    return tuple(keep)
