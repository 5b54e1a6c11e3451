"""A cluster to build on, and specs of models that take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph.doit_engine import DoitEngine
from tests.cluster.building.workshop import Recorder, Workshop, read_reproducible
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


@pytest.fixture(scope="package")
def squeezenet_here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a shipped model's build by the engine of one machine has that is reproducible."""
    workshop = Workshop(tmp_path_factory.mktemp("here"))
    workshop.write_shipped()
    outcome = DoitEngine().prepare(workshop.order(), Recorder())
    assert outcome.done, outcome.errors
    artifacts = workshop.root / "artifacts"
    return read_reproducible(artifacts / "squeezenet", artifacts / ".work/squeezenet/receipts")
