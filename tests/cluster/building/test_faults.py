"""Laws of preparing where nodes and drivers die: finished models stay, the others start again elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from ortprep.build.runner import build_here
from ortprep.bundle.verification import check_bundle
from ortprep.errors import PipelineError
from tests.cluster.builders import SmallCluster
from tests.cluster.building.builders import (
    LONG_MEASURE,
    Recorder,
    Workshop,
    local_receipts,
    read_reproducible,
    stored_receipts,
)
from tests.cluster.building.conftest import FARM
from tests.fakes import wait_for

pytestmark = pytest.mark.slow


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
