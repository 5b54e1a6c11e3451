"""A real cluster of several nodes on this machine, each with a cache of its own, and Serve on it."""

import os

import pytest

from tests.fakes import free_port

# Before anything imports Ray.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # else it depends on whether somebody has a token
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # as later versions of Ray have it, without a warning


HTTP_PORT = free_port()


@pytest.fixture(scope="package")
def cluster(tmp_path_factory):
    """A head without processors."""
    from tests.ray_inference.builders import SmallCluster

    with SmallCluster(tmp_path_factory.mktemp("caches")) as small:
        yield small


@pytest.fixture(scope="package")
def served(cluster):
    """A head without processors, and two nodes with one each; to be left with two such nodes."""
    from ray import serve

    cluster.add_node()
    cluster.add_node()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": HTTP_PORT})
    yield cluster
    serve.shutdown()
    cluster.clear()


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """`y = x + x`."""
    from tests.runtime.pool.builders import write_doubling

    return write_doubling(tmp_path_factory.mktemp("bundles") / "doubling")


@pytest.fixture
def nodes(served):
    """The cluster, with two nodes again afterwards."""
    yield served
    while len(served.nodes) < 2:
        served.add_node()
