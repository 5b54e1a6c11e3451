"""Laws of a job, on one node: what it builds from, whatever others left."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from ortprep.bundle.digest import digest_file
from ortprep.bundle.manifest import read_manifest
from ortprep.cluster.building.engine import fetch_source
from ortprep.cluster.building.job import BuildJob, JobResult, build_job, working_folder
from ortprep.errors import ClusterError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from ortprep.spec.reading import read_spec
from tests.builders import conv_net, write_model
from tests.cluster.building.builders import Recorder, Workshop

pytestmark = pytest.mark.manual


class Killed(BaseException):
    """Ends a build as SIGKILL does, as far as the work goes: nothing is tidied up."""


class KillingObserver(Recorder):
    """Ends a build when a task begins."""

    until = ""

    def __call__(self, event):
        super().__call__(event)
        if event[:2] == ("started", self.until):
            raise Killed


class Node:
    """Builds jobs of one model.

    Args:
        workshop: Where its files are.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.observer = KillingObserver()
        workshop.write_spec("net")

    def fetch(self, *, seed: int = 0) -> BuildJob:
        """Brings a model into the store; returns the job that builds it."""
        write_model(conv_net(seed=seed), self.workshop.root / "models" / "net.onnx")
        spec = read_spec(self.workshop.configs / "net.yaml")
        store, registry = str(self.workshop.store / "work"), str(self.workshop.store / "registry")
        fetched = fetch_source(spec, store, self.workshop.root / f"driver{seed}", Recorder())
        return BuildJob(*fetched, "farm", "cpu", store, registry)

    def build(self, job: BuildJob, folder: str, *, until: str = "") -> JobResult | None:
        """Builds a job, or is killed when a task begins."""
        self.observer.until = until
        place = self.workshop.root / folder
        place.mkdir(exist_ok=True)
        with contextlib.suppress(Killed):
            return build_job(job, place, self.observer)
        return None

    def done(self) -> list[str]:
        return self.observer.tasks("finished")

    def source_of(self, built: JobResult | None) -> str:
        """Returns the digest of the model that a published part was made from."""
        assert built is not None
        assert not built.failures
        out = self.workshop.root / f"pulled{len(self.observer.events)}"
        with open_catalogue(str(self.workshop.store / "registry")) as catalogue:
            versions = catalogue.read_state("net").versions
            version = next(name for name, one in versions.items() if built.part in one.part_digests)
            pull(PullRequest(VersionRef("net", version)), catalogue, out)
        return read_manifest(out).source.sha256


@pytest.fixture
def node(workshop):
    return Node(workshop)


def test_a_driver_gets_its_own_model_where_another_has_fetched_one_of_the_same_name(node):
    own = node.fetch(seed=1)
    digest = digest_file(node.workshop.root / "models" / "net.onnx")
    node.fetch(seed=2)
    assert node.source_of(node.build(own, "node")) == digest


def test_files_that_a_killed_build_left_count_only_if_they_are_as_recorded(node):
    job = node.fetch()
    assert node.build(job, "node", until="verify:net/portable") is None
    (left,) = (node.workshop.root / "node").rglob("optimize-portable/*_optimized.onnx")
    data = bytearray(left.read_bytes())
    data[len(data) // 2] ^= 1
    left.write_bytes(data)
    built = node.build(job, "node")
    assert built is not None
    assert not built.failures
    assert node.done().count("optimize:net/portable") == 1


def test_what_another_node_has_finished_is_not_built_again(node):
    job = node.fetch()
    built = node.build(job, "one")
    assert built is not None
    assert not built.is_current
    finished = node.done()
    assert {"package:net", "optimize:net/portable"} <= set(finished)
    again = node.build(job, "two")
    assert again is not None
    assert (again.part, again.is_current) == (built.part, True)
    assert node.done() == finished
    elsewhere = dataclasses.replace(job, registry=f"{job.registry}2")
    other = node.build(elsewhere, "three")
    assert other is not None
    assert not other.is_current


def test_a_source_that_the_store_lost_is_an_error_that_says_what_to_do(node):
    job = node.fetch()
    for path in (node.workshop.store / "work" / "net" / "files").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(ClusterError, match="the work store has lost the source of net"):
        node.build(job, "one")
    # The driver's copy is still there.
    built = node.build(node.fetch(), "one")
    assert built is not None
    assert not built.failures


def test_no_job_works_in_the_folder_of_another(node):
    one, other = node.fetch(seed=1), node.fetch(seed=2)
    with working_folder(one) as first, working_folder(other) as second:
        assert first != second
        (first / "file").write_text("")
    with working_folder(one) as again:
        assert (again / "file").exists()  # what a job left that was killed is taken up
