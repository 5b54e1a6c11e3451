"""Checks of a calibration set.

They run before anything long starts: a NaN in a range spoils a model silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import StageError
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array, find_element_type
from ortprep.stages.core.inputs.sample_files import find_file_problems
from ortprep.stages.core.results import ModelInterface


def check_calibration(samples: Sequence[Path], interface: ModelInterface) -> None:
    """Reads every sample, one at a time, and compares it with the model's inputs.

    Raises:
        StageError: There is no sample; one cannot be read, lacks an input, or has an array of another type or
            shape, or without values, or with a NaN or infinity; or calibration cannot feed an input of the
            model.
    """
    for spec in interface.inputs:
        if find_element_type(spec.dtype) is not None or "(" in spec.dtype:
            raise StageError(
                f"cannot calibrate a model with input {spec.name!r}\n"
                f"  expected a tensor with a numpy data type, got {spec.dtype}"
            )
    if not samples:
        raise StageError("calibration set is empty\n  expected at least one .npz file, got none")
    for path in samples:
        for problem in find_file_problems(path, interface):
            raise StageError(f"bad calibration sample: {problem}")
        arrays = read_tensors(path)
        for spec in interface.inputs:
            _check_array(path, spec, arrays[spec.name])


def _check_array(path: Path, spec: TensorSpec, array: Array) -> None:
    if not array.size:
        raise StageError(
            f"no values for input {spec.name!r} in calibration sample {path}\n"
            f"  expected at least one, got shape {list(array.shape)}"
        )
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        index = tuple(int(axis) for axis in np.argwhere(~np.isfinite(array))[0])
        raise StageError(
            f"input {spec.name!r} is not finite in calibration sample {path}\n"
            f"  expected numbers, got {array[index]} at index {list(index)}"
        )
