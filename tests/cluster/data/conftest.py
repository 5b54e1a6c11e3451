"""A real cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.builders import SmallCluster


@pytest.fixture(scope="package")
def nodes(cluster: SmallCluster) -> Iterator[SmallCluster]:
    """A head without processors, and two nodes with one each."""
    cluster.add_node()
    cluster.add_node()
    yield cluster
    cluster.clear()
