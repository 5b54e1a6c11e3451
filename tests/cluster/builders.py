"""Raylets on one machine, which can be killed, and what is built and served on them."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from ortprep.build.runner import BuildRequest
from ortprep.cluster import ServeConfig
from ortprep.cluster.building.engine import RayEngine
from ortprep.cluster.serving.deployment import build_application
from ortprep.cluster.serving.pinning import pin_version
from tests.builders import conv_net, write_model
from tests.fakes import wait_for
from tests.prepare.builders import AS_PREPARED
from tests.runtime.pool.builders import write_model_bundle

_STORE_BYTES = 100_000_000
_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 10,
    "health_check_timeout_ms": 5000,
    "worker_niceness": 0,
}
"""A node that is killed is given up within seconds, not after half a minute as by default; one that is slow,
since the machine is busy, is not. Beside other tests Ray's workers are as nice as those."""
_ATTEMPTS = 3


def _start(start: Callable[[], Any]) -> Any:
    """Starts a node; a raylet that the busy machine did not let come up within Ray's 30 s, once more."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


class SmallCluster:
    """A head that runs nothing, and nodes.

    Args:
        caches: Where each node has a cache of its own.
    """

    def __init__(self, caches: Path) -> None:
        self._caches = caches
        self.nodes: list[Any] = []

    def __enter__(self) -> SmallCluster:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, of its files and of its future
            head = {
                "num_cpus": 0,
                "object_store_memory": _STORE_BYTES,
                "include_dashboard": False,
                "_system_config": _SOON,
            }
            self._cluster: Any = _start(partial(Cluster, initialize_head=True, head_node_args=head))
        self.connect()
        return self

    def connect(self) -> None:
        """Makes this process a driver of the cluster."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def __exit__(self, *exception: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
            self._cluster.shutdown()
            # Ray drops its processes without waiting for them: each would warn within some later test.
            del self._cluster
            self.nodes.clear()
            gc.collect()

    def add_node(self, *, cpus: int = 1, labels: Mapping[str, str] | None = None) -> Any:
        """Starts a node and waits until the cluster has it."""
        cache = self._caches / f"node{len(list(self._caches.iterdir()))}"
        cache.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = _start(
                partial(
                    self._cluster.add_node,
                    num_cpus=cpus,
                    object_store_memory=_STORE_BYTES,
                    labels=dict(labels or {}),
                    env_vars={"ORTPREP_CACHE_DIR": str(cache)},
                )
            )
        self.nodes.append(node)
        node.cache = cache
        return node

    def kill_node(self, node: Any) -> None:
        """Kills a node's raylet, by which its workers end; nobody is told."""
        raylet = node.all_processes[ray._private.ray_constants.PROCESS_TYPE_RAYLET][0].process
        os.kill(raylet.pid, signal.SIGKILL)
        self.nodes.remove(node)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.remove_node(node, allow_graceful=False)

    def clear(self) -> None:
        """Removes all nodes, and waits until the head knows."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while self.nodes:
                self._cluster.remove_node(self.nodes.pop())
            gc.collect()  # here, as in `__exit__`, and not within some later test
        wait_for(lambda: sum(one["Alive"] for one in ray.nodes()) == 1, what="only the head is left")

    def replicas(self) -> list[int]:
        """Returns the processes of its nodes that run a replica of a deployment."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_actor = (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
                if is_actor and os.fsencode(self._caches) in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found


# -- specs, an engine, and somebody who writes down what is reported

REPOSITORY = Path(__file__).parents[2]

QUICK: dict[str, Any] = {
    "targets": ["cpu"],
    "tune": AS_PREPARED,
    "measure": {"rounds": 3, "cold_rounds": 0, "steady_s": 0.01},
}

LONG_MEASURE = {"rounds": 3, "cold_rounds": 0, "steady_s": 0.1}
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


# -- A model that takes as long as its request says: `y = x`, beside a product of matrices of any size

LONG = 1200
"""Some tenths of a second on one core."""


@contextmanager
def deployed(*bundles: Path | str, config: ServeConfig, replicas: int = 1) -> Iterator[Any]:
    """A handle of an application of some bundles, which is deleted afterwards."""
    app = build_application(
        config, dict(pin_version(str(bundle)) for bundle in bundles), on_gpu=False, replicas=replicas
    )
    try:
        yield serve.run(app, name="jobs", route_prefix=None)
    finally:
        serve.delete("jobs")


def write_slow(folder: Path) -> Path:
    one, size = np.ones((1, 1), np.float32), np.array([2, 2])
    return write_model_bundle(
        folder,
        {
            "y": ("Identity", ("x",)),
            "matrix": ("Expand", ("one", "size")),
            "product": ("MatMul", ("matrix", "matrix")),
            "z": ("ReduceMax", ("product",)),
        },
        {"x": ("float32", ("a", "b")), "one": ("float32", (1, 1)), "size": ("int64", (2,))},
        {"y": ("float32", ("a", "b")), "z": ("float32", (1, 1))},
        {
            "input:x": one,
            "input:one": one,
            "input:size": size,
            "output:y": one,
            "output:z": 2 * one,
        },
    )


def write_sizing(folder: Path) -> Path:
    """Writes `y = zeros(n)`, where `n` is the largest size of `x`: 4 bytes for each."""
    return write_model_bundle(
        folder,
        {"shape": ("Shape", ("x",)), "n": ("ReduceMax", ("shape",)), "y": ("ConstantOfShape", ("n",))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("n",))},
        {"input:x": np.ones((2, 3), np.float32), "output:y": np.zeros(3, np.float32)},
    )
