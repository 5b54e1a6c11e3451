"""Laws of preparing on a cluster: the same bundle as here, nothing twice, and every problem reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ortprep.build.runner import build_here
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.verification import check_bundle
from ortprep.errors import PipelineError, SpecError
from ortprep.registry.catalogue import open_catalogue
from ortprep.runtime import load
from ortprep.spec.fleet import HardwareKind
from tests.cluster.builders import (
    LONG_MEASURE,
    Recorder,
    SmallCluster,
    Workshop,
    local_receipts,
    read_reproducible,
    stored_receipts,
)
from tests.cluster.building.conftest import FARM
from tests.fakes import serve, wait_for

pytestmark = pytest.mark.slow

METRIC = """
def agreement(inputs, expected, got):
    return -max(float(abs(a[name] - b[name]).max()) for a, b in zip(expected, got) for name in a)
"""


def test_a_cluster_makes_the_bundle_that_this_machine_makes(farm, workshop, recorder):
    # All that a spec can name beside its source, and from outside its folder too.
    samples = workshop.root / "samples"
    samples.mkdir()
    rng = np.random.default_rng(0)
    for index in range(2):
        np.savez(samples / f"{index}.npz", image=rng.random((1, 3, 16, 16), dtype=np.float32))
    (workshop.configs / "metrics.py").write_text(METRIC)
    gate = {"metric": "metrics:agreement", "metric_at_least": -0.2}
    workshop.write_spec(
        "net",
        samples="../samples/*.npz",
        convert={"precision": ["int8"], "ladder": ["int8", "fp32"], "gate": gate},
    )
    here = build_here(workshop.order("net", artifacts="here"), Recorder())
    there = workshop.engine().prepare(workshop.order("net", artifacts="there"), recorder)
    assert (here, there) == ((), ())
    check_bundle(workshop.root / "there" / "net")
    ours = read_reproducible(
        workshop.root / "here" / "net", local_receipts(workshop.root / "here/.work/net/receipts")
    )
    theirs = read_reproducible(workshop.root / "there" / "net", stored_receipts(workshop.store, "net"))
    assert ours == theirs
    assert {"optimize/cpu", "optimize/portable", "optimize/cpu-int8"} <= set(ours["made"])
    x = {"image": np.ones((1, 3, 16, 16), np.float32)}
    bundles = [workshop.root / where / "net" for where in ("here", "there")]
    one, other = (load(bundle, precision="fp32").run(None, x) for bundle in bundles)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-4)
    assert recorder.tasks("finished") == ["fetch:net", "net@farm", "pull:net"]

    again = Recorder()
    assert workshop.engine().prepare(workshop.order("net", artifacts="there"), again) == ()
    assert not again.tasks("finished")
    assert again.tasks("current") == ["fetch:net", "net@farm", "pull:net"]


@pytest.mark.manual
def test_kinds_of_hardware_publish_into_one_version(farm, workshop, recorder):
    farm.add_node(cpus=2, labels={"ortprep.io/lone": "true"})
    kinds = {
        "farm": {"target": "cpu", "labels": {"ortprep.io/farm": "true"}},
        "lone": {"target": "cpu", "labels": {"ortprep.io/lone": "true"}},
    }
    workshop.write_fleet(kinds)
    workshop.write_spec("net")
    errors = workshop.engine().prepare(workshop.order(), recorder)
    assert errors == ()
    assert {"net@farm", "net@lone"} < set(recorder.tasks("finished"))
    with open_catalogue(str(workshop.store / "registry")) as catalogue:
        state = catalogue.read_state("net")
    assert len({part for version in state.versions.values() for part in version.part_digests}) == 2
    assert len(state.versions) - len(state.superseded_by) == 1
    # Both nodes are this machine: one part serves for both, unless measuring had each ship another form.
    names = [variant.name for variant in read_manifest(workshop.root / "artifacts" / "net").variants]
    assert (names[0], names[-1]) == ("cpu", "portable")
    assert all(name.startswith("cpu") for name in names[:-1])


@pytest.mark.manual
def test_a_device_is_one_build_s_alone(farm, workshop, recorder):
    farm.add_node(cpus=2, labels={"ortprep.io/alone": "true"})
    workshop.write_fleet({"alone": {"target": "cpu", "labels": {"ortprep.io/alone": "true"}}})
    for name in ("one", "two"):
        workshop.write_spec(name)
    errors = workshop.engine().prepare(workshop.order(), recorder)
    assert errors == ()
    receipts = [stored_receipts(workshop.store, name, "alone") for name in ("one", "two")]
    first, last = sorted(
        (min(r["finished_at"] for r in own), max(r["finished_at"] for r in own)) for own in receipts
    )
    assert first[1] <= last[0]


def test_a_kind_without_a_node_is_told_before_anything_is_begun(farm, workshop, recorder):
    workshop.write_spec("net")
    workshop.write_fleet({"none": {"target": "cpu", "labels": {"ortprep.io/none": "true"}}})
    with pytest.raises(SpecError, match=r"net on none: expected a node with ortprep\.io/none=true, got none"):
        workshop.engine().prepare(workshop.order(), recorder)
    assert not recorder.events
    assert not [path for path in workshop.store.rglob("*") if path.is_file()]


@pytest.mark.manual
def test_a_model_from_elsewhere_is_fetched_and_stays_in_the_registry_where_that_is_wanted(
    farm, workshop, recorder
):
    with serve() as server:
        workshop.write_spec("net", source={"url": f"{server.url}/net.onnx"})
        server.files["/net.onnx"] = (workshop.root / "models" / "net.onnx").read_bytes()
        errors = workshop.engine(collect=False).prepare(workshop.order(), recorder)
    assert errors == ()
    assert "fetch:net" in recorder.tasks("finished")
    assert not (workshop.root / "artifacts" / "net").exists()
    with open_catalogue(str(workshop.store / "registry")) as catalogue:
        assert len(catalogue.read_state("net").versions) == 1


@pytest.mark.manual
def test_ray_selects_by_labels_as_the_plan_does(farm):
    farm.add_node(cpus=1, labels={"ortprep.io/x": "a", "ortprep.io/selected": "true"})
    farm.add_node(cpus=1, labels={"ortprep.io/selected": "true"})
    nodes = {one["NodeID"]: one["Labels"] for one in ray.nodes() if "ortprep.io/selected" in one["Labels"]}

    @ray.remote(num_cpus=1)
    def where() -> str:
        return str(ray.get_runtime_context().get_node_id())

    for selector in ("a", "!a", "in(a, b)", "!in(a, b)", "in(b)", "!b", "b"):
        kind = HardwareKind(target="cpu", labels={"ortprep.io/x": selector, "ortprep.io/selected": "true"})
        fitting = {name for name, labels in nodes.items() if kind.fits(labels, {"CPU": 1})}
        asked = [where.options(label_selector=dict(kind.labels)).remote() for _ in range(3)]
        done, waiting = ray.wait(asked, num_returns=3, timeout=600 if fitting else 1)
        assert bool(waiting) is not bool(fitting), selector
        assert set(ray.get(done)) <= fitting
        for one in waiting:
            ray.cancel(one, force=True)


@pytest.mark.manual
def test_what_fails_names_where_and_the_others_go_on(farm, workshop, recorder):
    workshop.write_spec("good")
    workshop.write_spec("bad", verify={"rtol": 0, "atol": 0}, optimize={"timeout_s": 0.001})
    (workshop.root / "models" / "absent.onnx").unlink(missing_ok=True)
    workshop.write_spec("absent")
    (workshop.root / "models" / "absent.onnx").unlink()
    errors = workshop.engine().prepare(workshop.order(), recorder)
    text = "\n".join(map(str, errors))
    assert "optimize/cpu of bad" in text
    assert "absent.onnx" in text
    assert set(recorder.tasks("failed")) == {"fetch:absent", "bad@farm"}
    check_bundle(workshop.root / "artifacts" / "good")
    assert not (workshop.root / "artifacts" / "bad").exists()


# -- laws of preparing where nodes and drivers die: finished models stay, the others start again elsewhere


class Running:
    """An order that is carried out in a thread."""

    def __init__(self, workshop: Workshop, recorder: Recorder, **wanted: float) -> None:
        self.errors: tuple[PipelineError, ...] | None = None

        def run() -> None:
            self.errors = workshop.engine(**wanted).prepare(workshop.order(), recorder)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> tuple[PipelineError, ...]:
        self._thread.join(600)
        assert self.errors is not None
        return self.errors


def made(workshop: Workshop, model: str) -> dict[str, Any]:
    """Returns what a build on the cluster made that is reproducible; the bundle is checked."""
    bundle = workshop.root / "artifacts" / model
    check_bundle(bundle)
    return read_reproducible(bundle, stored_receipts(workshop.store, model))


def is_measuring(node: Any, model: str) -> bool:
    """Says whether a node has come as far as measuring a model."""
    return any((Path(node.cache) / "cluster").glob(f"*/artifacts/.work/{model}/receipts/verify-cpu.json"))


def wait_for_measuring(farm: SmallCluster, model: str) -> Any:
    """Returns the node that measures a model."""
    wait_for(lambda: any(is_measuring(node, model) for node in farm.nodes), what="a node measures")
    return next(node for node in farm.nodes if is_measuring(node, model))


def test_a_model_starts_again_on_another_node_when_its_node_dies(farm, workshop, recorder):
    workshop.write_spec("net", measure=LONG_MEASURE)
    assert build_here(workshop.order("net", artifacts="here"), Recorder()) == ()
    receipts = local_receipts(workshop.root / "here/.work/net/receipts")
    running = Running(workshop, recorder)
    farm.kill_node(wait_for_measuring(farm, "net"))
    try:
        errors = running.join()
    finally:
        farm.add_node(cpus=2, labels=FARM)
    assert errors == ()
    assert recorder.tasks("finished").count("net@farm") == 1
    assert any("started again: " in text for what, _, text in recorder.events if what == "said")
    assert made(workshop, "net") == read_reproducible(workshop.root / "here" / "net", receipts)


@pytest.mark.manual
def test_a_second_driver_goes_on_where_the_first_was_killed(farm, workshop, recorder, squeezenet_here):
    workshop.write_spec("first")
    workshop.write_shipped(measure=LONG_MEASURE)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ortprep", "prepare", "--engine", "ray", "--address", address]
    command += ["--store", str(workshop.store), "--configs", str(workshop.configs)]
    command += ["--artifacts", str(workshop.root / "artifacts")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ}
    ) as driver:
        assert driver.stderr is not None
        for line in driver.stderr:
            if line.startswith("done first@farm"):
                break
        os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL
    errors = workshop.engine().prepare(workshop.order(), recorder)
    assert errors == ()
    assert "first@farm" in recorder.tasks("current")
    # The specs differ in how long they measure.
    assert {**made(workshop, "squeezenet"), "spec": ""} == {**squeezenet_here, "spec": ""}


@pytest.mark.manual
def test_when_no_node_of_a_kind_is_left_the_build_says_so_and_can_go_on_later(farm, workshop, recorder):
    last = farm.add_node(cpus=2, labels={"ortprep.io/last": "true"})
    workshop.write_fleet({"last": {"target": "cpu", "labels": {"ortprep.io/last": "true"}}})
    workshop.write_spec("net", measure=LONG_MEASURE)
    running = Running(workshop, recorder, node_timeout_s=1.0)
    assert wait_for_measuring(farm, "net") is last
    farm.kill_node(last)
    errors = running.join()
    assert "net@last: no node of kind last is left" in str(errors[0])
    farm.add_node(cpus=2, labels={"ortprep.io/last": "true"})
    assert workshop.engine().prepare(workshop.order(), Recorder()) == ()
