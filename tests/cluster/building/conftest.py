"""A cluster to build on, and specs of models that take seconds."""

from __future__ import annotations

import pytest

from tests.cluster.builders import Recorder, Workshop, local_receipts, read_reproducible

FARM = {"ortprep.io/farm": "true"}


@pytest.fixture(scope="package")
def farm(cluster):
    """The cluster with two nodes that build."""
    for _ in range(2):
        cluster.add_node(cpus=2, labels=FARM)
    yield cluster
    cluster.clear()


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """Folders of specs, bundles and the store."""
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))
    return Workshop(tmp_path)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture(scope="package")
def squeezenet_here(squeezenet):
    """What a shipped model's build by the engine of one machine has that is reproducible."""
    receipts = local_receipts(squeezenet.work("squeezenet") / "receipts")
    return read_reproducible(squeezenet.bundle("squeezenet"), receipts)
