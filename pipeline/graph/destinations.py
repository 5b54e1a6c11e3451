"""Where bundles come to lie: what stands there is replaced, so nothing but an older bundle may.

Asked before any work, and by `doit clean` too, which removes it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.bundle.loader_config import LOADER_FILE
from pipeline.bundle.manifest import MANIFEST_FILE
from pipeline.bundle.verification import may_be_replaced
from pipeline.errors import SourceError, SpecError
from pipeline.graph.receipts import model_folder
from pipeline.spec.models import ModelSpec
from pipeline.stages.fetch.stage import local_source


def check_destinations(specs: Iterable[ModelSpec], artifacts: Path) -> None:
    """Refuses to build where something would be lost.

    Args:
        specs: What is to be built.
        artifacts: Folder of the bundles.

    Raises:
        SpecError: A bundle would replace what is none, or its own source; all such models are named.
    """
    problems = [problem for spec in specs for problem in _find_problems(spec, artifacts)]
    if problems:
        lines, hints = zip(*problems, strict=True)
        raise SpecError("a bundle would replace what is no bundle\n" + "\n".join(lines), hint=hints[0])


def _find_problems(spec: ModelSpec, artifacts: Path) -> Iterator[tuple[str, str]]:
    bundle = artifacts / spec.name
    if not may_be_replaced(bundle):
        aside = shlex.join(("mv", str(bundle), f"{bundle}.mine"))
        yield (
            f"  {spec.name}: expected nothing, an empty folder or a bundle at {bundle}, got {_show(bundle)}",
            f"{aside}   # or build elsewhere: --artifacts DIR",
        )
    for folder in (bundle, model_folder(artifacts, spec.name)):
        if _holds_source(folder, spec):
            yield (
                f"  {spec.name}: expected its source outside {folder}, got one that would go with it",
                "copy the source elsewhere, with its external data, and set source.path in its spec",
            )


def _holds_source(folder: Path, spec: ModelSpec) -> bool:
    try:
        source = local_source(spec)
    except SourceError:
        return False  # `fetch` says what is wrong with it
    # Not `Path.resolve`, which fails on links that lead in a circle.
    return source is not None and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(folder))


def _show(path: Path) -> str:
    if not path.is_dir():
        return "something else"
    names = sorted(entry.name for entry in path.iterdir())
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} and no {LOADER_FILE} or {MANIFEST_FILE}"
