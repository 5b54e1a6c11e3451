"""Laws of the driver, without Ray: jobs that come to nothing, models that cannot be fetched, and the pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import ray

from ortprep.build.build_plan import read_build_specs
from ortprep.cluster.building import engine as engine_module
from ortprep.cluster.building.connection import Connection
from ortprep.cluster.building.engine import BuildRun, RayEngine, pull_merged_bundle
from ortprep.cluster.building.fleet_plan import ClusterNode, Reservation, plan_fleet
from ortprep.cluster.building.job import run_job
from ortprep.errors import ClusterError, RegistryError, SpecError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.spec.fleet import read_fleet
from tests.cluster.building.builders import Recorder, Workshop
from tests.registry.builders import ELSEWHERE, HERE, Made, read_tree, write_bundle

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

    def reserve(self, kind: str, reservation: object) -> object:
        return kind, reservation

    def submit(self, job: object, place: object) -> object:
        del job, place
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
    run = BuildRun(cast("Connection", cluster), fleet, plan, engine, artifacts, recorder)
    return [str(error) for error in run.run()]


def test_a_job_starts_again_as_often_as_is_allowed_and_no_more(workshop, recorder):
    cluster = LostCluster(loses=True)
    (error,) = build(workshop, cluster, recorder, retries=3)
    assert len(cluster.submitted) == 4
    assert error.startswith("net@farm: interrupted 4 times, the last time by its node died")
    assert [task for task in recorder.tasks("said") if task == "net@farm"] == ["net@farm"] * 3
    assert recorder.tasks("failed") == ["net@farm"]
    assert recorder.tasks("ended") == [""]


def test_jobs_of_a_kind_without_a_node_are_given_up(workshop, recorder, monkeypatch):
    monkeypatch.setattr(engine_module, "_NODE_POLL_INTERVAL_S", 0.01)
    cluster = LostCluster(loses=False)
    (error,) = build(workshop, cluster, recorder, node_timeout_s=0.0)
    assert error.startswith("net@farm: no node of kind farm is left\n  expected one within 0 s")
    assert cluster.cancelled == cluster.submitted


def test_a_disk_that_fails_while_a_model_is_fetched_fails_that_model_alone(workshop, recorder, monkeypatch):
    def fail(*_: object, **__: object) -> bool:
        raise OSError(28, "No space left on device", "/disk")

    monkeypatch.setattr(engine_module, "run_task", fail)
    cluster = LostCluster(loses=False)
    (error,) = build(workshop, cluster, recorder)
    assert error.startswith("No space left on device: /disk")
    assert (recorder.tasks("failed"), cluster.submitted) == (["fetch:net"], [])


def test_resources_that_ray_refuses_are_named_with_their_kind():
    remote = ray.remote(run_job)
    with pytest.raises(SpecError, match="Ray refuses the resources of kind farm"):
        Connection(ray, remote, remote).reserve("farm", Reservation(-1, 0, {}, {}))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Digests of what two kinds of nodes published: one like this machine, one of another architecture."""
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    here = write_bundle(tmp_path / "here", made=(Made("cpu", HERE, b"here"),))
    other = write_bundle(tmp_path / "other", made=(Made("cpu", ELSEWHERE),), created_at="2026-11-21")
    with open_catalogue(str(tmp_path / "registry")) as catalogue:
        return [publish(bundle, catalogue).part for bundle in (here, other)]


def test_the_driver_gets_the_part_that_fits_it_best_and_only_once(parts, tmp_path):
    registry, out = str(tmp_path / "registry"), tmp_path / "out"
    assert pull_merged_bundle("net", parts, registry, out)
    assert read_tree(out) == read_tree(tmp_path / "here")
    assert not pull_merged_bundle("net", parts, registry, out)
    (out / "golden.npz").unlink()
    assert pull_merged_bundle("net", parts, registry, out)


def test_parts_that_are_not_there_are_an_error(parts, tmp_path):
    with pytest.raises(ClusterError, match="no version of net has the parts that its nodes published"):
        pull_merged_bundle(
            "net", [*parts, "sha256:" + "0" * 64], str(tmp_path / "registry"), tmp_path / "out"
        )


def test_places_are_the_same_wherever_a_node_works(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    engine = RayEngine(store="store", registry="registry")
    assert engine.store_url == str(tmp_path / "store" / "work")
    assert engine.registry_url == str(tmp_path / "registry")
    assert RayEngine(store="s3://bucket/x/").registry_url == "s3://bucket/x/registry"


def test_a_store_or_registry_that_cannot_be_used_is_told_before_anything_is_begun(workshop, recorder):
    workshop.write_spec("net")
    workshop.store.write_text("a file")
    with pytest.raises(RegistryError):
        workshop.engine().prepare(workshop.order(), recorder)
    workshop.store.unlink()
    with pytest.raises(RegistryError, match="credentials"):
        workshop.engine(registry="oci://me:secret@host/x").prepare(workshop.order(), recorder)
    assert not recorder.events
