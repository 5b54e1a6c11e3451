"""Names of specs: the one that a model file already has, or a free one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ortprep.bundle.paths import make_name
from ortprep.errors import SourceError, SpecError
from ortprep.init.tensor_copy import copy_path
from ortprep.quoting import quoted
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
    for name, spec in list_sources(configs).items():
        with suppress(SourceError):
            source = None if spec is None else local_source(spec)
            if source is not None and os.path.realpath(source) in wanted:
                return name
    return None


def choose_name(model: Path, configs: Path) -> str:
    """Returns a name that no spec has: that of a model's file, or of its folder and its file.

    Raises:
        SpecError: Other models have both.
    """
    taken, absolute = list_sources(configs), model.absolute()
    candidates = [make_name(model.stem), make_name(f"{absolute.parent.name}-{model.stem}")]
    for name in candidates:
        if name not in taken and not (configs / f"{name}.yaml").exists():
            return name
    raise SpecError(
        f"no name left for the spec of {model}\n  expected a free name, got other models called "
        f"{' and '.join(dict.fromkeys(candidates))} in {configs}",
        hint=f"ortprep init {quoted(model)} --name NAME",
    )
