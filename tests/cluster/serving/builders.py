"""A model that takes as long as its request says: `y = x`, beside a product of matrices of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve

from ortprep.cluster import ServeConfig
from ortprep.cluster.serving.deployment import build_application
from ortprep.cluster.serving.pinning import pin_version
from ortprep.runtime.tensors.element_types import Array
from tests.runtime.pool.builders import write_model_bundle

LONG = 1200
"""Some tenths of a second on one core."""


@contextmanager
def deployed(*bundles: Path | str, config: ServeConfig, replicas: int = 1) -> Iterator[Any]:
    """A handle of an application of some bundles, which is deleted afterwards."""
    app = build_application(
        config, dict(pin_version(str(bundle)) for bundle in bundles), on_gpu=False, replicas=replicas
    )
    try:
        yield serve.run(app, name="jobs", route_prefix=None)
    finally:
        serve.delete("jobs")


def write_slow(folder: Path) -> Path:
    one, size = np.ones((1, 1), np.float32), np.array([2, 2])
    return write_model_bundle(
        folder,
        {
            "y": ("Identity", ("x",)),
            "matrix": ("Expand", ("one", "size")),
            "product": ("MatMul", ("matrix", "matrix")),
            "z": ("ReduceMax", ("product",)),
        },
        {"x": ("float32", ("a", "b")), "one": ("float32", (1, 1)), "size": ("int64", (2,))},
        {"y": ("float32", ("a", "b")), "z": ("float32", (1, 1))},
        {
            "input:x": one,
            "input:one": one,
            "input:size": size,
            "output:y": one,
            "output:z": 2 * one,
        },
    )


def write_sizing(folder: Path) -> Path:
    """Writes `y = zeros(n)`, where `n` is the largest size of `x`: 4 bytes for each."""
    return write_model_bundle(
        folder,
        {"shape": ("Shape", ("x",)), "n": ("ReduceMax", ("shape",)), "y": ("ConstantOfShape", ("n",))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("n",))},
        {"input:x": np.ones((2, 3), np.float32), "output:y": np.zeros(3, np.float32)},
    )


def slow_batch(first: float, size: int = LONG) -> dict[str, Array]:
    one = np.ones((1, 1), np.float32)
    return {"x": first * one, "one": one, "size": np.array([size, size])}
