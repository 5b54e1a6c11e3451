"""Refuses a spec that does not fit its model; says what of a spec decides the inputs, for keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.bundle.digest import DigestCache
from pipeline.errors import SourceError, SpecError, StageError
from pipeline.spec.models import ModelSpec
from pipeline.stages.inputs.agreement import check_agreement
from pipeline.stages.inputs.bindings import find_binding_problems
from pipeline.stages.inputs.sample_files import check_sample_files, find_calibration_files, find_sample_files
from pipeline.stages.results import ModelInterface


def require_fit(spec: ModelSpec, interface: ModelInterface) -> None:
    """Checks that a spec and its samples fit a model; only what calibrates is read, of others the headers.

    `fetch` does so before it fetches weights. Later stages do so again: a spec that changed is no reason to
    download a model again.

    Raises:
        SpecError: They do not; the message has every problem.
    """
    problems = (*check_agreement(spec, interface), *check_sample_files(spec, interface))
    problems = problems or (*find_binding_problems(spec, interface), *_calibration_problems(spec, interface))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise SpecError(
            f"spec does not fit its model: {spec.name}, {spec.place}\n{lines}",
            hint=f"mend what is named above in {spec.place}, then ortprep prepare {spec.name}",
        )


def _calibration_problems(spec: ModelSpec, interface: ModelInterface) -> Iterator[str]:
    files = find_calibration_files(spec)
    if spec.convert is None or files is None:
        return
    # Imported here, since it brings in numpy, which keys are told without.
    from pipeline.stages.convert.calibration import check_calibration

    try:
        check_calibration(files, interface)
    except StageError as error:
        where = f"{spec.convert.quantize.calibration.samples!r} in {spec.folder}"
        yield f"convert.quantize.calibration.samples ({where}): {error.message}"


def calibration_key(spec: ModelSpec) -> list[list[str]] | None:
    """Returns name and digest of every calibration file that a spec names, None if it names none."""
    files = find_calibration_files(spec)
    if files is None:
        return None
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
    digest = DigestCache().digest
    try:
        return [[path.relative_to(spec.folder).as_posix(), digest(path)] for path in find_sample_files(spec)]
    except OSError as error:
        raise SourceError(
            f"cannot read the samples of {spec.name}: {error.filename or spec.samples}\n  {error.strerror}",
            hint=f"set samples in the spec of {spec.name}; it is relative to {spec.folder.resolve()}",
        ) from error
