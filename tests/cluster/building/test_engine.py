"""Laws of preparing on a cluster: the same bundle as here, nothing twice, and every problem told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.bundle.manifest import read_manifest
from pipeline.bundle.verification import check_bundle
from pipeline.errors import SpecError
from pipeline.graph.doit_engine import DoitEngine
from pipeline.registry.catalogue import open_catalogue
from pipeline.runtime import load
from tests.cluster.building.workshop import Recorder, Workshop
from tests.cluster.serving.small_cluster import SmallCluster

METRIC = """
def agreement(inputs, expected, got):
    return -max(float(abs(a[name] - b[name]).max()) for a, b in zip(expected, got) for name in a)
"""


def reproducible(bundle: Path) -> dict[str, Any]:
    """Returns what two builds of the same have to agree on: all that was not measured."""
    config = json.loads((bundle / "loader.json").read_text())
    manifest = json.loads((bundle / "manifest.json").read_text())
    return {
        "files": {entry["path"]: entry["sha256"] for entry in manifest["files"] if ".onnx" in entry["path"]},
        "golden": config["golden"]["file"]["sha256"],
        "variants": [
            {
                key: one[key]
                for key in ("name", "model", "session_options", "requirements", "providers")
                if key in one
            }
            for one in config["variants"]
        ],
        "source": manifest["source"],
        "spec": manifest.get("spec"),
    }


def test_a_cluster_makes_the_bundle_that_this_machine_makes(
    farm: SmallCluster, workshop: Workshop, recorder: Recorder
) -> None:
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
    here = DoitEngine().prepare(workshop.order("net", artifacts="here"), Recorder())
    there = workshop.engine().prepare(workshop.order("net", artifacts="there"), recorder)
    assert here.done
    assert there.done, there.errors
    check_bundle(workshop.root / "there" / "net")
    assert reproducible(workshop.root / "here" / "net") == reproducible(workshop.root / "there" / "net")
    x = {"image": np.ones((1, 3, 16, 16), np.float32)}
    one, other = (load(workshop.root / where / "net").run(None, x) for where in ("here", "there"))
    np.testing.assert_array_equal(one[0], other[0])
    assert "measure:net/cpu@farm" in recorder.tasks("finished")

    again = Recorder()
    assert workshop.engine().prepare(workshop.order("net", artifacts="there"), again).done
    assert not again.tasks("finished")
    assert set(recorder.tasks("finished")) == set(again.tasks("current"))


def test_kinds_of_hardware_publish_into_one_version(
    farm: SmallCluster, workshop: Workshop, recorder: Recorder
) -> None:
    farm.add_node(cpus=2, labels={"ortprep.io/lone": "true"})
    kinds = {
        "farm": {"target": "cpu", "labels": {"ortprep.io/farm": "true"}},
        "lone": {"target": "cpu", "labels": {"ortprep.io/lone": "true"}},
    }
    workshop.write_fleet(kinds)
    workshop.write_spec("net")
    outcome = workshop.engine().prepare(workshop.order(), recorder)
    assert outcome.done, outcome.errors
    assert {"package:net@farm", "package:net@lone"} < set(recorder.tasks("finished"))
    with open_catalogue(str(workshop.store / "registry")) as catalogue:
        state = catalogue.read_state("net")
    assert len(state.parts) == 2
    assert sum(not version.superseded_by for version in state.versions.values()) == 1
    # Both nodes are this machine, so one of the parts serves for both.
    manifest = read_manifest(workshop.root / "artifacts" / "net")
    assert [variant.name for variant in manifest.variants] == ["cpu", "portable"]


@pytest.mark.slow
def test_a_device_is_one_build_s_alone(farm: SmallCluster, workshop: Workshop, recorder: Recorder) -> None:
    farm.add_node(cpus=2, labels={"ortprep.io/alone": "true"})
    workshop.write_fleet({"alone": {"target": "cpu", "labels": {"ortprep.io/alone": "true"}}})
    for name in ("one", "two"):
        workshop.write_spec(name)
    outcome = workshop.engine().prepare(workshop.order(), recorder)
    assert outcome.done, outcome.errors
    models = [task.split("@")[0].split(":")[1].split("/")[0] for task in recorder.tasks("finished")]
    built = [name for name, task in zip(models, recorder.tasks("finished"), strict=True) if "@" in task]
    assert built in (sorted(built), sorted(built, reverse=True))
    assert set(built) == {"one", "two"}


def test_a_kind_without_a_node_is_told_before_anything_is_begun(
    farm: SmallCluster, workshop: Workshop, recorder: Recorder
) -> None:
    workshop.write_spec("net")
    workshop.write_fleet({"none": {"target": "cpu", "labels": {"ortprep.io/none": "true"}}})
    with pytest.raises(SpecError, match=r"net on none: expected a node with ortprep\.io/none=true, got none"):
        workshop.engine().prepare(workshop.order(), recorder)
    assert not recorder.events
    assert not workshop.store.exists()


def test_what_fails_names_where_and_the_others_go_on(
    farm: SmallCluster, workshop: Workshop, recorder: Recorder
) -> None:
    workshop.write_spec("good")
    workshop.write_spec("bad", verify={"rtol": 0, "atol": 0}, optimize={"timeout_s": 0.001})
    (workshop.root / "models" / "absent.onnx").unlink(missing_ok=True)
    workshop.write_spec("absent")
    (workshop.root / "models" / "absent.onnx").unlink()
    outcome = workshop.engine().prepare(workshop.order(), recorder)
    assert not outcome.done
    text = "\n".join(map(str, outcome.errors))
    assert "optimize/cpu of bad" in text
    assert "absent.onnx" in text
    assert "optimize:bad/cpu@farm" in recorder.tasks("failed")
    assert "package:bad@farm" in recorder.tasks("skipped")
    check_bundle(workshop.root / "artifacts" / "good")
    assert not (workshop.root / "artifacts" / "bad").exists()
