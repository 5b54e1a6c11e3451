"""A source model beside a bundle of it, whose answers tell which of the two a session is of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry, read_loader_config, write_loader_config
from tests.runtime.builders import sample, weights_of, write_bundle, write_linear, write_record

SOURCE_SEED, BUNDLE_SEED = 1, 0
REPOSITORY = Path(__file__).parents[3]


def write_source(path: Path, *, seed: int = SOURCE_SEED) -> Path:
    """Writes a model with its weights in a file beside it; returns the model's file."""
    return write_linear(path, weights_of(seed))[0]


def write_bundle_of(model: Path, folder: Path, *, inline: bool = False, **options: Any) -> Path:
    """Writes a bundle that says it was prepared from a model and its external data; returns its folder.

    With `inline` it says so of the model's file alone; `options` are those of `write_bundle`.
    """
    write_bundle(folder, seed=BUNDLE_SEED, **options)
    files = [model] if inline else [model, model.with_name(model.name + ".data")]
    source = tuple(FileEntry(file.name, file.stat().st_size, digest_file(file)) for file in files)
    write_loader_config(folder, read_loader_config(folder)._replace(source=source))
    write_record(folder)
    return folder


@contextmanager
def rewritten(folder: Path, **of_variants: Any) -> Iterator[None]:
    """Writes a bundle anew in the block; afterwards it still says what it was prepared from.

    Args:
        folder: The bundle.
        of_variants: What to replace in its variants; functions of the variant.
    """
    source = read_loader_config(folder).source
    yield
    config = read_loader_config(folder)
    variants = tuple(
        one._replace(**{name: change(one) for name, change in of_variants.items()}) for one in config.variants
    )
    write_loader_config(folder, config._replace(source=source, variants=variants))
    write_record(folder)


def is_of_bundle(session: onnxruntime.InferenceSession) -> bool:
    """Says whether a session answers as the bundle and not as the source."""
    (answer,) = session.run(None, {"x": sample()})
    of_bundle = np.allclose(answer, sample() @ weights_of(BUNDLE_SEED), atol=1e-4)
    assert of_bundle or np.allclose(answer, sample() @ weights_of(SOURCE_SEED), atol=1e-4)
    return of_bundle


def run_python(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh process that finds this package."""
    return run_program([sys.executable, "-c", code, *map(str, arguments)], variables)


def run_program(
    program: list[str], variables: Mapping[str, str], *, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program with some variables beside the environment's."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(
        program,
        env=environment,
        input=stdin,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
