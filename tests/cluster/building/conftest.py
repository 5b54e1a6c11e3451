"""A cluster to build on, and specs of models that take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.building.workshop import Recorder, Workshop
from tests.cluster.small_cluster import SmallCluster

FARM = {"ortprep.io/farm": "true"}


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with SmallCluster(tmp_path_factory.mktemp("caches")) as small:
        yield small


@pytest.fixture(scope="package")
def farm(cluster: SmallCluster) -> SmallCluster:
    """The cluster with two nodes that build, beside those that serve."""
    for _ in range(2):
        cluster.add_node(cpus=2, labels=FARM)
    return cluster


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Folders of specs, bundles and the store."""
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))
    return Workshop(tmp_path)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
