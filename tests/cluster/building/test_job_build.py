"""Laws of a cell, on one node: what it builds from, whatever others left."""

from __future__ import annotations

import contextlib

import pytest

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks
from ortprep.bundle.digest import digest_file
from ortprep.bundle.manifest import read_manifest
from ortprep.cluster.building.job import BuildJob, Event, JobResult
from ortprep.cluster.building.job_build import build_job
from ortprep.cluster.building.node_folder import working_folder
from ortprep.cluster.building.source_fetch import fetch_model
from ortprep.cluster.building.spec_files import describe_spec
from ortprep.cluster.building.work_store import WorkStore
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from ortprep.spec.reading import read_spec
from ortprep.stages.core.contract import Plan
from tests.builders import conv_net, write_model
from tests.cluster.building.builders import Workshop

pytestmark = pytest.mark.manual


class Killed(BaseException):
    """Ends a build as SIGKILL does, as far as the work goes: nothing is tidied up."""


class Node:
    """Builds cells of one model.

    Args:
        workshop: Where its files are.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.events: list[Event] = []
        workshop.write_spec("net")

    def fetch(self, *, seed: int = 0) -> BuildJob:
        """Brings a model into the store; returns the cell that builds it."""
        write_model(conv_net(seed=seed), self.workshop.root / "models" / "net.onnx")
        spec = read_spec(self.workshop.configs / "net.yaml")
        task = build_tasks(Plan(spec, ("cpu",), {}), STAGES, self.workshop.root / f"driver{seed}")[0]
        store, registry = str(self.workshop.store / "work"), str(self.workshop.store / "registry")
        source = fetch_model(task, WorkStore(store, "net"), lambda _: None)
        return BuildJob(describe_spec(spec)[0], source, "farm", "cpu", store, registry)

    def build(self, cell: BuildJob, folder: str, *, until: str = "") -> JobResult | None:
        """Builds a cell, or is killed when a task begins."""

        def tell(event: Event) -> None:
            self.events.append(event)
            if until and (event.what, event.task) == ("started", until):
                raise Killed

        place = self.workshop.root / folder
        place.mkdir(exist_ok=True)
        with contextlib.suppress(Killed):
            return build_job(cell, place, tell)
        return None

    def done(self, what: str = "finished") -> list[str]:
        return [event.task for event in self.events if event.what == what]

    def source_of(self, built: JobResult | None) -> str:
        """Returns the digest of the model that a published part was made from."""
        assert built is not None
        assert not built.failures
        out = self.workshop.root / f"pulled{len(self.events)}"
        with open_catalogue(str(self.workshop.store / "registry")) as catalogue:
            versions = catalogue.read_state("net").versions
            version = next(name for name, one in versions.items() if built.part in one.part_digests)
            pull(PullRequest(VersionRef("net", version)), catalogue, out)
        return read_manifest(out).source.sha256


@pytest.fixture
def node(workshop: Workshop) -> Node:
    return Node(workshop)


def test_a_driver_gets_its_own_model_where_another_has_fetched_one_of_the_same_name(node: Node) -> None:
    own = node.fetch(seed=1)
    digest = digest_file(node.workshop.root / "models" / "net.onnx")
    node.fetch(seed=2)
    assert node.source_of(node.build(own, "node")) == digest


def test_files_that_a_killed_build_left_count_only_if_they_are_as_recorded(node: Node) -> None:
    cell = node.fetch()
    assert node.build(cell, "node", until="verify:net/portable@farm") is None
    (left,) = (node.workshop.root / "node").rglob("optimize-portable/*_optimized.onnx")
    data = bytearray(left.read_bytes())
    data[len(data) // 2] ^= 1
    left.write_bytes(data)
    built = node.build(cell, "node")
    assert built is not None
    assert not built.failures
    assert node.done().count("optimize:net/portable@farm") == 1


def test_what_the_store_lost_is_made_again(node: Node) -> None:
    cell = node.fetch()
    assert node.build(cell, "one", until="verify:net/portable@farm") is None
    files = {path for path in (node.workshop.store / "work" / "net" / "files").rglob("*") if path.is_file()}
    model = (node.workshop.root / "models" / "net.onnx").read_bytes()
    for path in files:
        if path.read_bytes() != model:
            path.unlink()
    built = node.build(cell, "two")
    assert built is not None
    assert not built.failures
    assert node.done().count("optimize:net/portable@farm") == 2
    assert any("running " in event.text and " again: " in event.text for event in node.events)


def test_a_source_that_the_store_lost_is_an_error_that_says_what_to_do(node: Node) -> None:
    cell = node.fetch()
    for path in (node.workshop.store / "work" / "net" / "files").rglob("*"):
        if path.is_file():
            path.unlink()
    built = node.build(cell, "one")
    assert built is not None
    assert built.part is None
    assert "the work store has lost the output of fetch of net" in built.failures[0]["message"]
    # The driver's copy is still there.
    assert node.build(node.fetch(), "one", until="verify:net/cpu@farm") is None
    assert "optimize:net/cpu@farm" in node.done()


def test_no_cell_works_in_the_folder_of_another(node: Node) -> None:
    one, other = node.fetch(seed=1), node.fetch(seed=2)
    with working_folder(one) as first, working_folder(other) as second:
        assert first != second
        (first / "file").write_text("")
    assert not first.exists()


def test_the_same_answers_come_from_a_build_that_went_on_elsewhere(node: Node) -> None:
    cell = node.fetch()
    assert node.build(cell, "one", until="measure:net/cpu@farm") is None
    built = node.build(cell, "two")
    assert {"optimize:net/cpu@farm", "verify:net/cpu@farm"} <= set(node.done("current"))
    assert node.source_of(built)
