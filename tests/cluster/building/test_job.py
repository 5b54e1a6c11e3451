"""A spec travels with all that it names; what a node does beside its job: its niceness and its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.bundle.digest import digest_file
from ortprep.bundle.manifest import read_manifest
from ortprep.cluster.building.engine import fetch_source
from ortprep.cluster.building.job import (
    BuildJob,
    JobResult,
    ShippedSpec,
    build_job,
    describe_spec,
    place_spec,
    working_folder,
)
from ortprep.errors import CacheError, ClusterError, SourceError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import read_spec
from ortprep.stages.core.accuracy import gate_key
from ortprep.stages.core.sample_files import samples_key
from tests.builders import conv_net, write_model
from tests.cluster.builders import Recorder, Workshop


def build(root: Path) -> ModelSpec:
    for folder in ("samples/deep", "team/configs"):
        (root / folder).mkdir(parents=True)
    np.savez(root / "samples" / "deep" / "a.npz", x=np.zeros(1))
    (root / "team" / "configs" / "metrics.py").write_text("def f(inputs, expected, got): return 1.0\n")
    data = {
        "name": "net",
        "source": {"demo": "squeezenet"},
        "samples": "../../samples/**/*.npz",
        "convert": {
            "precision": ["int8"],
            "quantize": {"mode": "static"},
            "gate": {"metric": "metrics:f", "metric_at_least": 0.5},
        },
    }
    return ModelSpec.model_validate(data).located_in(root / "team" / "configs", file="net.yaml")


def test_every_key_is_the_same_where_it_comes_to_lie(tmp_path):
    spec = build(tmp_path / "home")
    shipped, root = describe_spec(spec)
    assert {entry.path for entry in shipped.files} == {
        "samples/deep/a.npz",
        "team/configs/metrics.py",
    }
    away = tmp_path / "away"
    for entry in shipped.files:
        (away / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / entry.path, away / entry.path)
    placed = place_spec(shipped, away)
    assert placed.folder == away / "team" / "configs"
    assert placed.model_dump() == spec.model_dump()
    for key in (samples_key, gate_key):
        assert key(placed) == key(spec)


def test_links_are_followed_as_the_local_build_follows_them(tmp_path):
    spec = build(tmp_path / "home")
    real = tmp_path / "home" / "samples" / "deep" / "a.npz"
    (tmp_path / "elsewhere.npz").write_bytes(real.read_bytes())
    real.unlink()
    real.symlink_to(tmp_path / "elsewhere.npz")
    (tmp_path / "link").symlink_to(tmp_path / "home" / "team" / "configs")
    linked = spec.located_in(tmp_path / "link", file="net.yaml")
    shipped, root = describe_spec(linked)
    assert (shipped, root) == describe_spec(spec)
    assert real in [root / entry.path for entry in shipped.files]


@pytest.mark.attack
def test_a_link_to_a_private_file_is_no_sample(tmp_path):
    """The store would get a copy, which others may read, before anybody looks at what it is."""
    spec = build(tmp_path / "home")
    (tmp_path / "id_ed25519").write_text("secret")
    (tmp_path / "home" / "samples" / "deep" / "b.npz").symlink_to(tmp_path / "id_ed25519")
    with pytest.raises(SourceError, match=r"expected a link to an \.npz file"):
        describe_spec(spec)


def test_a_spec_that_names_nothing_travels_alone(tmp_path):
    spec = ModelSpec.model_validate({"name": "net", "source": {"demo": "squeezenet"}})
    shipped, _ = describe_spec(spec.located_in(tmp_path, file="net.yaml"))
    assert (shipped.place, shipped.files) == (".", ())
    assert place_spec(shipped, tmp_path / "away").folder == tmp_path / "away"


SPEC = ShippedSpec({"name": "net"}, "net.yaml", ".", ())
SOURCE = TaskReceipt(RECEIPT_VERSION, "fetch", {}, (), {}, "2026-01-01T00:00:00+00:00", 1.0)
JOB = BuildJob(SPEC, SOURCE, "farm", "cpu", "file:///store", "file:///registry")

CHILD = """
import logging, os
logging.basicConfig(format="%(message)s")
from ortprep.cluster.building.job import reset_niceness
os.nice(5)
if {drop}:
    os.setuid(65534)
reset_niceness()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(*, drop: bool) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", CHILD.format(drop=drop)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take niceness back")
def test_what_is_measured_runs_as_jobs_do_not_as_ray_s_workers():
    assert run(drop=False).stdout == "0\n"


def test_who_may_not_take_the_niceness_back_is_warned():
    ended = run(drop=os.getuid() == 0)
    assert int(ended.stdout) >= 5
    assert "start Ray with RAY_worker_niceness=0" in ended.stderr


@pytest.mark.attack
def test_nothing_is_removed_behind_a_link_in_the_place_of_the_folder(tmp_path, monkeypatch):
    cache, precious = tmp_path / "cache", tmp_path / "mine" / "precious"
    precious.mkdir(parents=True)
    os.utime(precious, (0, 0))
    cache.mkdir()
    (cache / "cluster").symlink_to(precious.parent)
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    with pytest.raises(CacheError, match="not safe to use"), working_folder(JOB):
        pass
    assert precious.exists()


# -- laws of a job, on one node: what it builds from, whatever others left


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


@pytest.mark.manual
def test_a_driver_gets_its_own_model_where_another_has_fetched_one_of_the_same_name(node):
    own = node.fetch(seed=1)
    digest = digest_file(node.workshop.root / "models" / "net.onnx")
    node.fetch(seed=2)
    assert node.source_of(node.build(own, "node")) == digest


@pytest.mark.manual
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


@pytest.mark.manual
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


@pytest.mark.manual
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


@pytest.mark.manual
def test_no_job_works_in_the_folder_of_another(node):
    one, other = node.fetch(seed=1), node.fetch(seed=2)
    with working_folder(one) as first, working_folder(other) as second:
        assert first != second
        (first / "file").write_text("")
    with working_folder(one) as again:
        assert (again / "file").exists()  # what a job left that was killed is taken up
