"""Replicas and nodes are killed, and versions replaced, while requests are in flight."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from ray import serve

from bench.ray_faults import StormOptions, run_storm
from tests.cluster.serving.conftest import HTTP_PORT
from tests.fakes import free_port
from tests.runtime.pool.builders import write_model_bundle

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning:ray", "ignore::DeprecationWarning"
)

ONE = np.ones((1, 1), np.float32)


@pytest.mark.slow
def test_no_request_that_is_repeated_is_lost_and_an_update_loses_nothing(nodes, bundle, tmp_path):
    """Half of the requests come by HTTP, half by a handle; a replica and a node are killed."""
    options = StormOptions(
        requests=300, nodes=2, kill_replica_every=100, kill_node_every=200, http_port=HTTP_PORT
    )
    negation = write_model_bundle(
        tmp_path / "negation",
        {"y": ("Neg", ("x",))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("a", "b"))},
        {"input:x": ONE, "output:y": -ONE},
    )
    try:
        check_report(run_storm(nodes, negation, bundle, options), options)
    finally:
        serve.delete("storm")


@pytest.mark.manual
def test_a_long_storm_loses_nothing(tmp_path):
    """A longer run of `python -m bench.ray_faults`, on a cluster of its own."""
    options = StormOptions(requests=5000, nodes=2, http_port=free_port())
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "bench.ray_faults", "--requests=5000", "--nodes=2", "--out", str(out)]
    command.append(f"--http-port={options.http_port}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_report(json.loads(out.read_text()), options)


def check_report(report: dict[str, Any], options: StormOptions) -> None:
    for part in ("faults", "update"):
        assert report[part]["lost"] == []
        assert report[part]["wrong"] == 0
        assert report[part]["answered"].keys() == {"http", "handle"}
    assert sum(report["faults"]["answered"].values()) == options.requests
    assert report["faults"]["replicas_killed"] >= 1
    assert report["faults"]["nodes_killed"] >= 1
    assert report["update"]["new_version_answers"]
