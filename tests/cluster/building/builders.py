"""Specs, an engine, and somebody who writes down what is reported."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ortprep.build.runner import BuildRequest
from ortprep.cluster.building.engine import RayEngine
from tests.builders import conv_net, write_model
from tests.prepare.builders import AS_PREPARED

REPOSITORY = Path(__file__).parents[3]

QUICK: dict[str, Any] = {
    "targets": ["cpu"],
    "tune": AS_PREPARED,
    "measure": {"rounds": 3, "cold_rounds": 0, "steady_s": 0.01},
}

LONG_MEASURE = {"rounds": 3, "cold_rounds": 0, "steady_s": 0.5}
"""Takes long enough for a test to see that it has begun, and to end a process before it is done."""


def local_receipts(folder: Path) -> list[dict[str, Any]]:
    """Returns the receipts of a build on this machine."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def stored_receipts(store: Path, name: str, kind: str = "farm") -> list[dict[str, Any]]:
    """Returns the receipts that the only job of a model on a kind of hardware left."""
    (path,) = (store / "work" / name / "outcomes" / kind).iterdir()
    receipts: list[dict[str, Any]] = json.loads(path.read_text())["receipts"]
    return receipts


def read_reproducible(bundle: Path, receipts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what two builds of the same have to agree on: all that is not measured.

    Which of the files that were made are shipped, as which variants, and which of these comes first, is
    measured; only the portable variant is always there.
    """
    made = {}
    for receipt in receipts:
        if receipt["task"].split("/")[0] in ("convert", "optimize"):
            made[receipt["task"]] = {entry["path"]: entry["sha256"] for entry in receipt["files"]}
    config = json.loads((bundle / "loader.json").read_text())
    manifest = json.loads((bundle / "manifest.json").read_text())
    shipped = {variant["name"] for variant in config["variants"]}
    assert "portable" in shipped, f"expected a portable variant in {bundle}, got {sorted(shipped)}"
    return {
        "made": made,
        "golden": config["golden"]["file"]["sha256"],
        "interface": (config["inputs"], config["outputs"]),
        "source": manifest["source"],
        "spec": manifest["spec_digest"],
    }


@dataclass
class Recorder:
    """An observer that keeps everything."""

    events: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event):
        with self.lock:
            text = event.text if event.kind != "progressed" else str(event.fraction)
            self.events.append((event.kind, event.task, text))

    def tasks(self, what: str) -> list[str]:
        with self.lock:
            return [task for kind, task, _ in self.events if kind == what]


class Workshop:
    """Folders of a build.

    Args:
        root: Where they are made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configs = root / "configs"
        self.store = root / "store"
        (root / "models").mkdir()
        self.configs.mkdir()
        self.write_fleet({"farm": {"target": "cpu", "labels": {"ortprep.io/farm": "true"}}})

    def write_fleet(self, kinds: dict[str, Any]) -> None:
        (self.configs / "fleet.yaml").write_text(yaml.safe_dump({"hardware": kinds}))

    def write_spec(self, name: str, **sections: Any) -> None:
        """Writes a spec of a small convolution net, with some sections of its own."""
        write_model(conv_net(), self.root / "models" / f"{name}.onnx")
        inputs = {"image": {"shapes": [[1, 3, 16, 16]]}}
        own = {
            "name": name,
            "source": {"path": f"../models/{name}.onnx"},
            "inputs": inputs,
            **QUICK,
            **sections,
        }
        (self.configs / f"{name}.yaml").write_text(yaml.safe_dump(own))

    def write_shipped(self, **sections: Any) -> None:
        """Writes the spec of a shipped model, with some sections of its own."""
        shipped = yaml.safe_load((REPOSITORY / "configs" / "squeezenet.yaml").read_text())
        own = {**shipped, **QUICK, **sections}
        (self.configs / "squeezenet.yaml").write_text(yaml.safe_dump(own))

    def order(self, *names: str, artifacts: str = "artifacts", **wanted: Any) -> BuildRequest:
        return BuildRequest(configs=self.configs, artifacts=self.root / artifacts, names=names, **wanted)

    def engine(self, **wanted: Any) -> RayEngine:
        return RayEngine(store=str(self.store), **wanted)
