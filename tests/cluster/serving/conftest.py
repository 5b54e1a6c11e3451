"""A real cluster of several nodes on this machine, each with a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime.element_types import Array
from tests.cluster.small_cluster import SmallCluster
from tests.prepare.project import Project
from tests.runtime.pool.pool_bundles import write_doubling


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """A head without processors, and two nodes with one each; to be left with two such nodes."""
    with SmallCluster(tmp_path_factory.mktemp("caches")) as small:
        small.add_node()
        small.add_node()
        yield small


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`y = x + x`."""
    return write_doubling(tmp_path_factory.mktemp("bundles") / "doubling")


@pytest.fixture
def nodes(cluster: SmallCluster) -> Iterator[SmallCluster]:
    """The cluster, with two nodes again afterwards, and no actor left."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    yield cluster
    eventually(lambda: not cluster.actors(), within_s=20)


def batch(first: float = 1, size: int = 4) -> dict[str, Array]:
    x = np.arange(size, dtype=np.float32).reshape(1, size)
    x[0, 0] = first
    return {"x": x}


def eventually(holds: Callable[[], bool], *, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()


@pytest.fixture(scope="session")
def squeezenet(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that has prepared one of the shipped models."""
    project = Project(tmp_path_factory.mktemp("shipped"))
    project.write_spec(
        "squeezenet",
        source={"demo": "squeezenet"},
        inputs={"data_0": {"shapes": [[1, 3, 224, 224]], "range": [0, 1]}},
    )
    outcome = project.run("prepare")
    assert outcome.code == 0, outcome.err
    return project
