"""Refuses a spec that does not fit its model; says what of a spec decides the inputs, for keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.bundle.digest import DigestCache
from pipeline.errors import SourceError, SpecError
from pipeline.spec.models import ModelSpec
from pipeline.stages.inputs.agreement import check_agreement
from pipeline.stages.inputs.bindings import find_binding_problems
from pipeline.stages.inputs.sample_files import check_sample_files, find_sample_files
from pipeline.stages.results import ModelInterface


def require_fit(spec: ModelSpec, interface: ModelInterface) -> None:
    """Checks that a spec and its samples fit a model; of the samples only headers are read.

    `fetch` does so before it fetches weights. Later stages do so again: a spec that changed is no reason to
    download a model again.

    Raises:
        SpecError: They do not; the message has every problem.
    """
    problems = (*check_agreement(spec, interface), *check_sample_files(spec, interface))
    problems = problems or tuple(find_binding_problems(spec, interface))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise SpecError(
            f"spec does not fit its model: {spec.name}, {spec.place}\n{lines}",
            hint=f"mend what is named above in {spec.place}, then ortprep prepare {spec.name}",
        )


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
