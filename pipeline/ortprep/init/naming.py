"""What a spec that is written for a model file is called, and which spec there already is for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ortprep.bundle.paths import is_safe_name, make_name
from ortprep.errors import SourceError, SpecError
from ortprep.init.tensor_copy import copy_path
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import list_sources
from ortprep.stages.fetch.stage import local_source


def find_spec_name(model: Path, configs: Path, *, or_copy: bool = False) -> str | None:
    """Returns the name of the spec in a folder whose source is that file, None if there is none.

    Args:
        model: The model's file.
        configs: The folder of specs.
        or_copy: Whether a spec counts whose source is the copy that `init` made of the file.
    """
    wanted = {os.path.realpath(one) for one in (model, *([copy_path(model, configs)] if or_copy else []))}
    sources = _list_local_sources(configs)
    return next((name for name, path in sources.items() if path and os.path.realpath(path) in wanted), None)


def choose_name(model: Path, configs: Path) -> str:
    """Returns a name for a model's spec that no spec of another model has.

    That is its file's name, or its folder's and its file's.

    Raises:
        SpecError: Other models have both.
    """
    taken = _list_local_sources(configs)
    absolute = model.absolute()
    candidates = [make_name(model.stem), make_name(f"{absolute.parent.name}-{model.stem}")]
    for name in candidates:
        if _is_free(name, absolute, configs, taken):
            return name
    raise SpecError(
        f"no name left for the spec of {model}\n  expected a free name, got other models called "
        f"{' and '.join(dict.fromkeys(candidates))} in {configs}",
        hint=f"ortprep init {quoted(model)} --name NAME",
    )


def _list_local_sources(configs: Path) -> dict[str, Path | None]:
    """Returns the local source of every spec in a folder, by the spec's name; None for a source elsewhere."""
    return {name: _find_local_source(spec) for name, spec in list_sources(configs).items()}


def _find_local_source(spec: ModelSpec | None) -> Path | None:
    try:
        return None if spec is None else local_source(spec)
    except SourceError:
        return None


def _is_free(name: str, model: Path, configs: Path, taken: Mapping[str, Path | None]) -> bool:
    if name in taken:
        source = taken[name]
        return source is not None and os.path.realpath(source) == os.path.realpath(model)
    return is_safe_name(name) and not (configs / f"{name}.yaml").exists()
