"""What holds for every test on Ray: one cluster, to which each folder adds its nodes."""

from __future__ import annotations

import os

import pytest

# Before anything imports Ray.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # else it depends on whether somebody has a token
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # as later versions of Ray have it, without a warning


@pytest.fixture(scope="package")
def cluster(tmp_path_factory):
    """A head without processors; each folder adds nodes, and removes them."""
    from tests.cluster.builders import SmallCluster

    with SmallCluster(tmp_path_factory.mktemp("caches")) as small:
        yield small


@pytest.fixture(scope="session")
def squeezenet(shared_folder):
    """A project that has prepared one of the shipped models; not to be changed."""
    from tests.prepare.builders import new_squeezenet, prepare_once

    return prepare_once(shared_folder / "squeezenet", new_squeezenet)[0]
