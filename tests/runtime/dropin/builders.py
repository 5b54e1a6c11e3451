"""A source model beside a bundle of it, whose answers tell which of the two a session is of."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry, read_loader_config, write_loader_config
from tests.runtime.builders import sample, weights_of, write_bundle, write_linear, write_record

SOURCE_SEED, BUNDLE_SEED = 1, 0
REPOSITORY = Path(__file__).parents[3]


def write_source(path, *, seed=SOURCE_SEED):
    """Writes a model with its weights in a file beside it; returns the model's file."""
    return write_linear(path, weights_of(seed))[0]


def write_bundle_of(model, folder, *, inline=False, **options):
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
def rewritten(folder, **of_variants):
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


def is_of_bundle(session):
    """Says whether a session answers as the bundle and not as the source."""
    (answer,) = session.run(None, {"x": sample()})
    of_bundle = np.allclose(answer, sample() @ weights_of(BUNDLE_SEED), atol=1e-4)
    assert of_bundle or np.allclose(answer, sample() @ weights_of(SOURCE_SEED), atol=1e-4)
    return of_bundle


def run_python(code, *arguments, **variables):
    """Runs a script in a fresh process that finds this package."""
    return run_program([sys.executable, "-c", code, *map(str, arguments)], variables)


def run_program(program, variables, *, stdin="", cwd=None):
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
