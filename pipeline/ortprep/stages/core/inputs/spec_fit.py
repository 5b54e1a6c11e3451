"""Refuses a spec that does not fit its model; says what of a spec decides the inputs, for keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import SourceError, SpecError, StageError
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.inputs.agreement import (
    check_agreement,
    fits_shape,
    resolve_dimensions,
    shape_sets,
)
from ortprep.stages.core.inputs.sample_files import (
    check_calibration,
    check_sample_files,
    find_calibration_files,
    find_sample_files,
)
from ortprep.stages.core.results import ModelInterface


def require_fit(spec: ModelSpec, interface: ModelInterface) -> None:
    """Checks that a spec and its samples fit a model, by the headers of all samples but calibration files.

    `fetch` does so before it fetches weights. Later stages do so again: a changed spec does not download a
    model again.

    Raises:
        SpecError: They do not fit; the message lists every problem.
    """
    problems = (*check_agreement(spec, interface), *check_sample_files(spec, interface))
    problems = problems or (*_binding_problems(spec, interface), *_calibration_problems(spec, interface))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise SpecError(
            f"spec does not fit its model: {spec.name}, {spec.place}\n{lines}",
            hint=f"correct the entries named above in {quoted(spec.place)}, "
            f"then ortprep prepare {quoted(spec.name)}",
        )


def _calibration_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    files = find_calibration_files(spec)
    if spec.convert is None or files is None:
        return
    try:
        check_calibration(files, interface)
    except StageError as error:
        where = f"{spec.convert.quantize.calibration.samples!r} in {spec.folder}"
        yield f"convert.quantize.calibration.samples ({where}): {error.message}"


def calibration_key(spec: ModelSpec) -> list[list[str]] | None:
    """Returns name and digest of every calibration file that a spec names, None if it names none."""
    files = find_calibration_files(spec)
    return None if files is None else _digests(spec, files)


def _digests(spec: ModelSpec, files: tuple[Path, ...]) -> list[list[str]]:
    digest = DigestCache().digest
    return [[path.relative_to(spec.folder).as_posix(), digest(path)] for path in files]


def inputs_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what a spec declares of inputs, as JSON types."""
    return {name: declared.model_dump(mode="json") for name, declared in spec.inputs.items()}


def samples_key(spec: ModelSpec) -> list[list[str]] | None:
    """Returns name and digest of every sample, in order, None for a spec that asks for none.

    Names are relative to the spec's folder, so that they are the same from wherever the build is started.

    Raises:
        SourceError: One cannot be read, or the glob names what no file can be called.
    """
    if spec.samples is None:
        return None
    try:
        return _digests(spec, find_sample_files(spec))
    except OSError as error:
        raise SourceError(
            f"cannot read the samples of {spec.name}: {error.filename or spec.samples}\n  {error.strerror}",
            hint=f"set samples in the spec of {quoted(spec.name)}; "
            f"it is relative to {quoted(spec.folder.resolve())}",
        ) from error


def _binding_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    """Yields what is wrong with `convert.shapes`, of a spec that agrees with its model otherwise."""
    if spec.convert is None:
        return
    for binding in filter(None, (spec.convert.binding, *spec.convert.buckets)):
        try:
            sizes = resolve_dimensions(interface.inputs, binding)
        except StageError as error:
            yield f"convert.shapes: {error.message}"
            continue
        inputs = [_bind(item, sizes) for item in interface.inputs]
        declared = (
            all(fits_shape(item, shapes[item.name]) for item in inputs)
            for shapes in shape_sets(spec, interface)
        )
        # Real samples have shapes of their own, which are read with them.
        if spec.samples is None and not any(declared):
            shapes = ", ".join(f"{item.name} {list(item.shape or ())}" for item in inputs)
            yield f"convert.shapes: expected declared input shapes that fit {shapes}, got none"


def _bind(item: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    shape = tuple(
        axis if isinstance(axis, int) else sizes.get(axis or f"{item.name}[{position}]", axis)
        for position, axis in enumerate(item.shape or ())
    )
    return item if item.shape is None else dataclasses.replace(item, shape=shape)
