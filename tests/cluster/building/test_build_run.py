"""Laws of a build whose jobs come to nothing: how often they start again, and when they are given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from ortprep.build.build_plan import read_build_specs
from ortprep.cluster.building import build_run
from ortprep.cluster.building.build_run import BuildRun
from ortprep.cluster.building.connection import Connection
from ortprep.cluster.building.engine import RayEngine
from ortprep.cluster.building.fleet_plan import plan_fleet
from ortprep.cluster.nodes import ClusterNode
from ortprep.errors import ClusterError
from ortprep.spec.fleet import read_fleet
from tests.cluster.building.builders import Recorder, Workshop

NODE = ClusterNode("1", "node", {"ortprep.io/farm": "true"}, {"CPU": 2})


class LostCluster:
    """A cluster that places every job and loses it, or never runs one.

    Args:
        loses: Whether jobs end, all with the death of their node.
    """

    def __init__(self, *, loses: bool) -> None:
        self._loses = loses
        self.submitted: list[object] = []
        self.cancelled: list[object] = []

    def submit(self, job: object, reservation: object) -> object:
        del job, reservation
        self.submitted.append(object())
        return self.submitted[-1]

    def wait(self, refs: Sequence[object], timeout_s: float) -> list[object]:
        del timeout_s
        return list(refs) if self._loses else []

    def collect(self, ref: object) -> Any:
        del ref
        raise ClusterError("its node died")

    def list_nodes(self) -> tuple[ClusterNode, ...]:
        return ()

    def cancel(self, refs: Sequence[object]) -> None:
        self.cancelled += refs


def build(workshop: Workshop, cluster: LostCluster, recorder: Recorder, **wanted: Any) -> list[str]:
    """Builds a model on a cluster; returns what failed."""
    workshop.write_spec("net")
    artifacts = workshop.root / "artifacts"
    specs = read_build_specs(workshop.configs, artifacts, names=())
    fleet = read_fleet(None, configs=workshop.configs)
    plan = plan_fleet(specs, fleet, [NODE])
    engine = RayEngine(store=str(workshop.store), **wanted)
    run = BuildRun(cast(Connection, cluster), fleet, plan, engine, artifacts, recorder)
    return [str(error) for error in run.run()]


def test_a_job_starts_again_as_often_as_is_allowed_and_no_more(
    workshop: Workshop, recorder: Recorder
) -> None:
    cluster = LostCluster(loses=True)
    (error,) = build(workshop, cluster, recorder, retries=3)
    assert len(cluster.submitted) == 4
    assert error.startswith("net@farm: interrupted 4 times, the last time by its node died")
    assert [task for task in recorder.tasks("said") if task == "net@farm"] == ["net@farm"] * 3
    assert recorder.tasks("failed") == ["net@farm"]
    assert recorder.tasks("ended") == [""]


def test_jobs_of_a_kind_without_a_node_are_given_up(
    workshop: Workshop, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_run, "_NODE_POLL_INTERVAL_S", 0.01)
    cluster = LostCluster(loses=False)
    (error,) = build(workshop, cluster, recorder, node_timeout_s=0.0)
    assert error.startswith("net@farm: no node of kind farm is left\n  expected one within 0 s")
    assert cluster.cancelled == cluster.submitted
