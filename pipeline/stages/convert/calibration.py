"""Checks of a calibration set.

They run before anything long starts: a NaN in a range spoils a model silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import BundleError, StageError
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, dtype_name, find_element_type
from ortprep.stages.core.results import ModelInterface


def check_calibration(samples: Sequence[Path], interface: ModelInterface) -> None:
    """Reads every sample, one at a time, and compares it with the model's inputs.

    Raises:
        StageError: There is no sample; one cannot be read, lacks an input, has an unknown array, or an array
            of another type or shape, or without values, or with a NaN or infinity; or calibration cannot feed
            an input of the model.
    """
    for spec in interface.inputs:
        _require_feedable(spec)
    if not samples:
        names = ", ".join(f"{spec.name}={spec.name}" for spec in interface.inputs)
        raise StageError(
            "calibration set is empty\n  expected at least one .npz file, got none",
            hint=f"python -c \"import numpy; numpy.savez('sample-0.npz', {names})\"",
        )
    for path in samples:
        _check_sample(path, interface.inputs)


def _require_feedable(spec: TensorSpec) -> None:
    if find_element_type(spec.dtype) is not None or "(" in spec.dtype:
        raise StageError(
            f"cannot calibrate a model with input {spec.name!r}\n"
            f"  expected a tensor of a type that numpy has, got {spec.dtype}"
        )


def _check_sample(path: Path, inputs: Sequence[TensorSpec]) -> None:
    try:
        arrays = read_tensors(path)
    except BundleError as error:
        raise StageError(f"cannot read a calibration sample: {path}\n  {error.message}") from error
    _check_names(path, arrays, [spec.name for spec in inputs])
    for spec in inputs:
        _check_array(path, spec, arrays[spec.name])


def _check_names(path: Path, arrays: Mapping[str, Array], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in arrays]
    unknown = [name for name in arrays if name not in names]
    if missing:
        raise StageError(
            f"calibration sample lacks input {missing[0]!r}: {path}\n"
            f"  expected arrays {', '.join(names)}, got {', '.join(arrays) or 'none'}"
        )
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], names, n=1) or names
        raise StageError(
            f"calibration sample has an array that is no input: {unknown[0]!r} in {path}\n"
            f"  expected {', '.join(names) or 'none'}",
            hint=f"perhaps {nearest[0]!r} is meant" if nearest else None,
        )


def _check_array(path: Path, spec: TensorSpec, array: Array) -> None:
    got = dtype_name(array.dtype)
    if got != spec.dtype:
        raise StageError(
            f"wrong type of input {spec.name!r} in calibration sample {path}\n"
            f"  expected {spec.dtype}, got {got}"
        )
    if spec.shape is not None and not _fits(array.shape, spec.shape):
        raise StageError(
            f"wrong shape of input {spec.name!r} in calibration sample {path}\n"
            f"  expected {_format_shape(spec.shape)}, got {_format_shape(array.shape)}"
        )
    if not array.size:
        raise StageError(
            f"no values for input {spec.name!r} in calibration sample {path}\n"
            f"  expected at least one, got shape {_format_shape(array.shape)}"
        )
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        index = tuple(int(axis) for axis in np.argwhere(~np.isfinite(array))[0])
        raise StageError(
            f"input {spec.name!r} is not finite in calibration sample {path}\n"
            f"  expected numbers, got {array[index]} at index {_format_shape(index)}"
        )


def _fits(shape: tuple[int, ...], expected: tuple[int | str | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want == size for size, want in zip(shape, expected, strict=True) if isinstance(want, int)
    )


def _format_shape(shape: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if axis is None else str(axis) for axis in shape)}]"
