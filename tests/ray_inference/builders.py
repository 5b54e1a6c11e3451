"""Raylets on one machine, which can be killed, and what is served on them."""

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

from ortprep.ray_inference.deployment import build_application
from ortprep.ray_inference.pinning import pin_version
from tests.fakes import wait_for
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


def _start(start):
    """Starts a node; a raylet that the busy machine did not let come up within Ray's 30 s, once more."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def quiet():
    """Ignores Ray's own warnings, of its files and of its future."""
    return warnings.catch_warnings(action="ignore")


class SmallCluster:
    """A head that runs nothing, and nodes.

    Args:
        caches: Where each node has a cache of its own.
    """

    def __init__(self, caches):
        self._caches = caches
        self.nodes = []

    def __enter__(self):
        with quiet():
            head = {
                "num_cpus": 0,
                "object_store_memory": _STORE_BYTES,
                "include_dashboard": False,
                "_system_config": _SOON,
            }
            self._cluster = _start(partial(Cluster, initialize_head=True, head_node_args=head))
        self.connect()
        return self

    def connect(self):
        """Makes this process a driver of the cluster."""
        with quiet():
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def __exit__(self, *exception):
        with quiet():
            ray.shutdown()
            self._cluster.shutdown()
            # Ray drops its processes without waiting for them: each would warn within some later test.
            del self._cluster
            self.nodes.clear()
            gc.collect()

    def add_node(self):
        """Starts a node and waits until the cluster has it."""
        cache = self._caches / f"node{len(list(self._caches.iterdir()))}"
        cache.mkdir()
        with quiet():
            node = _start(
                partial(
                    self._cluster.add_node,
                    num_cpus=1,
                    object_store_memory=_STORE_BYTES,
                    env_vars={"ORTPREP_CACHE_DIR": str(cache)},
                )
            )
        self.nodes.append(node)
        node.cache = cache
        return node

    def kill_node(self, node):
        """Kills a node's raylet, by which its workers end; nobody is told."""
        raylet = node.all_processes[ray._private.ray_constants.PROCESS_TYPE_RAYLET][0].process
        os.kill(raylet.pid, signal.SIGKILL)
        self.nodes.remove(node)
        with quiet():
            self._cluster.remove_node(node, allow_graceful=False)

    def clear(self):
        """Removes all nodes, and waits until the head knows."""
        with quiet():
            while self.nodes:
                self._cluster.remove_node(self.nodes.pop())
            gc.collect()  # here, as in `__exit__`, and not within some later test
        wait_for(lambda: sum(one["Alive"] for one in ray.nodes()) == 1, what="only the head is left")

    def replicas(self):
        """Returns the processes of its nodes that run a replica of a deployment."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_actor = (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
                if is_actor and os.fsencode(self._caches) in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found


# -- A model that takes as long as its request says: `y = x`, beside a product of matrices of any size

LONG = 1200
"""Some tenths of a second on one core."""


@contextmanager
def deployed(*bundles, config, replicas=1):
    """A handle of an application of some bundles, which is deleted afterwards."""
    app = build_application(
        dataclasses.replace(config, replicas=replicas),
        dict(pin_version(str(bundle)) for bundle in bundles),
        on_gpu=False,
    )
    try:
        yield serve.run(app, name="jobs", route_prefix=None)
    finally:
        serve.delete("jobs")


def write_slow(folder):
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
        {"input:x": one, "input:one": one, "input:size": size, "output:y": one, "output:z": 2 * one},
    )


def write_sizing(folder):
    """Writes `y = zeros(n)`, where `n` is the largest size of `x`: 4 bytes for each."""
    return write_model_bundle(
        folder,
        {"shape": ("Shape", ("x",)), "n": ("ReduceMax", ("shape",)), "y": ("ConstantOfShape", ("n",))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("n",))},
        {"input:x": np.ones((2, 3), np.float32), "output:y": np.zeros(3, np.float32)},
    )
