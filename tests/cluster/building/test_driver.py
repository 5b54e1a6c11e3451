"""Laws of the driver, without Ray: jobs that come to nothing, models that cannot be fetched, and the pull."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from ortprep.build.build_plan import read_build_specs
from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import describe_files
from ortprep.cluster.building import engine as engine_module
from ortprep.cluster.building.connection import Connection
from ortprep.cluster.building.engine import BuildRun, RayEngine, pull_merged_bundle
from ortprep.cluster.building.fleet_plan import (
    ClusterNode,
    Reservation,
    describe_hardware,
    plan_fleet,
    reserve,
)
from ortprep.cluster.building.job import run_job
from ortprep.cluster.building.work_store import JobOutcome, WorkStore
from ortprep.errors import ClusterError, IntegrityError, NotPublishedError, RegistryError, SpecError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.runtime.machine.hardware import Gpu, Hardware, read_hardware
from ortprep.spec.fleet import DEFAULT_FLEET, Fleet, HardwareKind, read_fleet
from ortprep.spec.models import ModelSpec
from ortprep.transport.fsspec_folder import FsspecFolder
from tests.cluster.builders import Recorder, Workshop
from tests.registry.builders import ELSEWHERE, HERE, Made, read_tree, write_bundle
from tests.registry.servers import BUCKET, s3_server

NODE = ClusterNode("node", {"ortprep.io/farm": "true"}, {"CPU": 2})


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


# -- what is prepared on which kind of node, by labels that say what a machine is


def spec(name: str = "net", **sections: Any) -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "source": {"demo": "squeezenet"}, **sections})


def node(name: str = "n", *, cpus: float = 4, gpus: float = 0, **labels: str) -> ClusterNode:
    return ClusterNode(
        name, {f"ortprep.io/{key}": value for key, value in labels.items()}, {"CPU": cpus, "GPU": gpus}
    )


FLEET = Fleet(
    hardware={
        "old": HardwareKind(target="cpu", labels={"ortprep.io/avx512f": "!true"}),
        "new": HardwareKind(target="cpu", labels={"ortprep.io/avx512f": "true"}),
        "big": HardwareKind(target="cuda", labels={"ortprep.io/gpu": "in(H100, H200)"}),
    }
)
NODES = (node("a"), node("b", avx512f="true"), node("c", gpus=8, avx512f="true", gpu="H200"))


def places(
    specs: list[ModelSpec], nodes: tuple[ClusterNode, ...] = NODES, **wanted: Any
) -> set[tuple[str, str, str]]:
    plan = plan_fleet(specs, wanted.pop("fleet", FLEET), nodes, **wanted)
    return {(share.spec.name, share.kind, share.target) for share in plan.assignments}


def test_auto_is_prepared_on_every_kind_that_has_a_node():
    assert places([spec()]) == {("net", "old", "cpu"), ("net", "new", "cpu"), ("net", "big", "cuda")}
    assert places([spec()], NODES[:1]) == {("net", "old", "cpu")}


def test_named_targets_are_prepared_on_every_kind_of_theirs():
    assert places([spec(targets=["cpu"])]) == {("net", "old", "cpu"), ("net", "new", "cpu")}


def test_a_kind_without_a_node_is_told_with_all_others_and_with_what_there_is():
    with pytest.raises(SpecError) as caught:
        plan_fleet([spec("one", targets=["cpu", "cuda"]), spec("two", targets=["cuda"])], FLEET, NODES[1:2])
    text = str(caught.value)
    assert "one on old: expected a node with ortprep.io/avx512f=!true, got none" in text
    assert "one on big: expected a node with ortprep.io/gpu=in(H100, H200), GPU: 1, got none" in text
    assert "two on big" in text
    assert "b: CPU 4, GPU 0, ortprep.io/avx512f=true" in text


def test_what_has_no_node_is_left_out_when_the_user_says_so_and_named():
    plan = plan_fleet([spec(targets=["cpu", "cuda"])], FLEET, NODES[1:2], skip_unavailable=True)
    assert [one.kind for one in plan.assignments] == ["new"]
    assert set(plan.left_out) == {"net on old", "net on big"}


def test_a_model_of_which_nothing_is_left_is_an_error_all_the_same():
    with pytest.raises(SpecError, match="net: none of big has a node"):
        plan_fleet([spec(targets=["cuda"])], FLEET, NODES[:1], skip_unavailable=True)


def test_one_kind_or_one_target_can_be_prepared_alone():
    assert places([spec()], only="new") == {("net", "new", "cpu")}
    assert places([spec()], only="cuda") == {("net", "big", "cuda")}
    with pytest.raises(SpecError, match="no such hardware in the fleet: tpu"):
        places([spec()], only="tpu")


def test_a_target_that_no_kind_is_for_is_told():
    cpus = Fleet(hardware={"new": FLEET.hardware["new"]})
    with pytest.raises(SpecError, match="no kind of hardware in the fleet offers target cuda"):
        places([spec(targets=["cpu", "cuda"])], fleet=cpus)


def test_without_a_fleet_any_node_is_a_cpu_and_any_with_a_gpu_a_cuda():
    assert places([spec()], (node(),), fleet=DEFAULT_FLEET) == {("net", "cpu", "cpu")}
    both = places([spec()], (node(gpus=1),), fleet=DEFAULT_FLEET)
    assert both == {("net", "cpu", "cpu"), ("net", "cuda", "cuda")}


def test_a_head_that_runs_nothing_is_no_cpu():
    with pytest.raises(SpecError):
        places([spec()], (node(cpus=0),), fleet=DEFAULT_FLEET)


@given(st.lists(st.integers(1, 256), min_size=1))
def test_a_cpu_is_reserved_whole_and_a_gpu_alone(sizes):
    nodes = [node(f"n{index}", cpus=size, gpus=1) for index, size in enumerate(sizes)]
    on_cpu, on_gpu = (reserve(DEFAULT_FLEET.hardware[target], nodes) for target in ("cpu", "cuda"))
    # What every node of the kind has, and of the smallest all.
    assert on_cpu.cpus == min(sizes)
    assert (on_gpu.gpus, on_gpu.cpus) == (1, 1)


@pytest.mark.parametrize(
    ("selector", "value", "fits"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("!a", "a", False),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a)", None, False),
        ("!in(a, b)", "c", True),
        ("!in(a, b)", "a", False),
        ("!in(a, b)", None, True),
    ],
)
def test_labels_are_selected_as_ray_does(selector, value, fits):
    kind = HardwareKind(target="cpu", labels={"ortprep.io/x": selector})
    labels = {} if value is None else {"ortprep.io/x": value}
    assert kind.fits(labels, {"CPU": 1}) is fits


def test_custom_resources_count():
    kind = HardwareKind(target="cpu", resources={"quiet": 1})
    assert not kind.fits({}, {"CPU": 4})
    assert kind.fits({}, {"CPU": 4, "quiet": 1})


VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def hardware(cpu: str, gpu: str | None) -> Hardware:
    gpus = () if gpu is None else (Gpu(gpu, (9, 0), 1, "580", "13.0", "GPU-1"),)
    return Hardware("x86_64", cpu, ("avx2", "avx512f", "fma"), 4, 2**30, gpus)


@given(st.text(max_size=100), st.none() | st.text(max_size=100))
def test_every_value_is_one_that_ray_takes(cpu, gpu):
    for key, value in describe_hardware(hardware(cpu, gpu)).items():
        assert VALUE.fullmatch(value)
        assert key.startswith("ortprep.io/")


def test_instruction_sets_and_the_gpu_are_told():
    labels = describe_hardware(hardware("Intel(R) Xeon(R) CPU @ 2.50GHz", "NVIDIA H200"))
    assert labels == {
        "ortprep.io/machine": "x86_64",
        "ortprep.io/cpu": "Intel-R-Xeon-R-CPU-2.50GHz",
        "ortprep.io/avx2": "true",
        "ortprep.io/avx512f": "true",
        "ortprep.io/gpu": "NVIDIA-H200",
        "ortprep.io/compute-capability": "9.0",
    }


def test_this_machine_has_some():
    assert describe_hardware(read_hardware())["ortprep.io/machine"]


# -- laws of the work store, on a disk and on S3: what is read is what was written, or nothing

SOURCE = f"sha256:{0:064x}"


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        return WorkStore(f"s3://{BUCKET}/{tmp_path.name}", "net")
    return WorkStore(str(tmp_path / "store"), "net")


def receipt(folder: Path | None = None) -> TaskReceipt:
    files = () if folder is None else describe_files(folder, digest_file)
    return TaskReceipt(
        RECEIPT_VERSION, "optimize/cpu", {"a": 1}, files, {"b": [1, 2]}, "2026-01-01T00:00:00+00:00", 1.5
    )


def fill(folder: Path) -> Path:
    (folder / "below").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "below" / "weights").write_bytes(bytes(range(256)) * 4096)
    (folder / "twin").write_bytes(b"graph")
    return folder


def test_files_come_back_as_they_were_and_are_sent_once(store, tmp_path, monkeypatch):
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    sent: list[str] = []
    upload = FsspecFolder.upload

    def note(own: FsspecFolder, path: str, entry: FileEntry, *rest: Any) -> None:
        sent.append(entry.path)
        upload(own, path, entry, *rest)

    monkeypatch.setattr(FsspecFolder, "upload", note)
    store.upload(folder, entries)
    assert len(sent) == 2  # twins are one file
    store.upload(folder, entries)
    assert len(sent) == 2
    store.fetch_files(tmp_path / "right", entries)
    assert describe_files(tmp_path / "right", digest_file) == entries


def test_a_record_is_read_as_it_was_written(store, tmp_path):
    assert store.read_outcome("cpu", SOURCE) is None
    written = receipt(fill(tmp_path / "left"))
    outcome = JobOutcome(RECEIPT_VERSION, "file:///registry", "sha256:1", (written,))
    store.write_outcome("cpu", SOURCE, outcome)
    assert store.read_outcome("cpu", SOURCE) == outcome
    assert store.read_outcome("h100", SOURCE) is None
    assert store.read_outcome("cpu", f"sha256:{1:064x}") is None


def test_what_is_lost_is_said_and_leaves_nothing_half_done(store, tmp_path):
    entries = receipt(fill(tmp_path / "left")).files
    with pytest.raises(NotPublishedError):
        store.fetch_files(tmp_path / "right", entries)
    assert not (tmp_path / "right").exists()


def test_a_file_that_is_not_as_described_is_not_kept(store, tmp_path):
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    (folder / "model.onnx").write_bytes(b"GRAPH")
    with pytest.raises(IntegrityError):
        store.upload(folder, [entry for entry in entries if entry.path == "model.onnx"])


@pytest.mark.attack
def test_other_bytes_in_the_store_are_found(tmp_path):
    store = WorkStore(str(tmp_path / "store"), "net")
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    store.upload(folder, entries)
    for path in (tmp_path / "store" / "net" / "files").rglob("*"):
        if path.is_file() and path.stat().st_size == 5:
            path.write_bytes(b"GRAPH")
    entry = next(entry for entry in entries if entry.path == "model.onnx")
    with pytest.raises(IntegrityError):
        store.fetch_files(tmp_path / "right", [entry])
    # And whoever has the right ones can send them again.
    store.upload(folder, [entry])
    store.fetch_files(tmp_path / "right", [entry])


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": "9.0"}', "[]", '"x"'])
def test_an_outcome_that_cannot_be_read_means_that_the_work_is_done_again(tmp_path, text):
    path = tmp_path / "store" / "net" / "outcomes" / "cpu" / f"{0:064x}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert WorkStore(str(tmp_path / "store"), "net").read_outcome("cpu", SOURCE) is None


@pytest.mark.attack
@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_no_name_leaves_the_store(tmp_path, name):
    store = WorkStore(str(tmp_path / "store"), name)
    with pytest.raises(RegistryError, match="bad name in a store"):
        store.read_outcome("cpu", SOURCE)
    with pytest.raises(RegistryError, match="bad name in a store"):
        WorkStore(str(tmp_path / "store"), "net").read_outcome(name, SOURCE)


@pytest.mark.attack
def test_credentials_do_not_belong_into_its_url():
    with pytest.raises(RegistryError, match="credentials in a store's URL") as caught:
        WorkStore("ftp://me:secret@host/store", "net")
    assert "secret" not in str(caught.value)
