"""A real cluster of several nodes on this machine, each with a cache of its own, and Serve on it."""

from __future__ import annotations

import numpy as np
import pytest
from ray import serve

from ortprep.runtime.tensors.element_types import Array
from tests.fakes import free_port
from tests.runtime.pool.builders import write_doubling

HTTP_PORT = free_port()


@pytest.fixture(scope="package")
def served(cluster):
    """A head without processors, and two nodes with one each; to be left with two such nodes."""
    cluster.add_node()
    cluster.add_node()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": HTTP_PORT})
    yield cluster
    serve.shutdown()
    cluster.clear()


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """`y = x + x`."""
    return write_doubling(tmp_path_factory.mktemp("bundles") / "doubling")


@pytest.fixture
def nodes(served):
    """The cluster, with two nodes again afterwards."""
    yield served
    while len(served.nodes) < 2:
        served.add_node()


def batch(first: float = 1, size: int = 4) -> dict[str, Array]:
    x = np.arange(size, dtype=np.float32).reshape(1, size)
    x[0, 0] = first
    return {"x": x}
