"""Is a request lost, or answered wrongly, when replicas and nodes are killed? `python -m bench.ray_faults`.

A cluster of several raylets on this machine serves a model of one `Neg`. Half of the requests use HTTP, half
a handle; clients repeat failures. Meanwhile replicas and whole nodes are killed with SIGKILL. Then the model
is replaced by another version under load, and nothing is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.result_file import describe_machine, format_results
from ortprep.errors import PipelineError

THREADS = 4
"""Clients of each kind."""

UPDATE_SHARE = 5
"""A rolling update is under load of so many times fewer requests than the deaths, again until it is done."""
RETRIES = 50

Infer = Callable[[Any], float]
"""Sends a request, and returns the first number of its answer."""

_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
    "health_check_timeout_ms": 5000,
}


@dataclass(frozen=True)
class StormOptions:
    """Settings of the storm.

    Attributes:
        requests: Number of requests, half of them by HTTP, half by a handle.
        nodes: Nodes of one processor each, with a replica each.
        kill_replica_every: Answers between two deaths of a replica.
        kill_node_every: Answers between two deaths of a node.
        http_port: Where Serve's proxy listens.
    """

    requests: int = 50_000
    nodes: int = 3
    kill_replica_every: int = 400
    kill_node_every: int = 3000
    http_port: int = 8123


@dataclass
class StormReport:
    """Results of the requests.

    Attributes:
        answered: Answered requests, by client.
        lost: Requests that failed in spite of retries, with the last reason.
        wrong: Answers that are another request's, or nobody's.
        repeated: Tries after a failure, by its kind.
        replicas_killed: How many.
        nodes_killed: How many.
        seconds: How long it took.
    """

    answered: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    replicas_killed: int = 0
    nodes_killed: int = 0
    seconds: float = 0.0


def find_replicas() -> list[int]:
    """Returns the processes of this machine that are a replica of the model's deployment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica:storm:"):
                found.append(int(path.name))
    return found


class FaultyCluster(Protocol):
    """A cluster whose nodes can be killed.

    Attributes:
        nodes: Those that run.
    """

    nodes: list[Any]

    def add_node(self) -> Any:
        """Starts a node."""

    def kill_node(self, node: Any) -> None:
        """Kills a node with SIGKILL."""


class RayNodes:
    """Nodes of one processor each.

    Args:
        cluster: As `ray.cluster_utils` makes it.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    def add_node(self) -> None:
        """Starts a node."""
        self.nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=100_000_000))

    def kill_node(self, node: Any) -> None:
        """Kills a node with SIGKILL."""
        import ray

        raylet = node.all_processes[ray._private.ray_constants.PROCESS_TYPE_RAYLET][0].process
        os.kill(raylet.pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)


def infer_by_http(port: int) -> Infer:
    """Returns a function that asks over HTTP."""
    import tritonclient.http

    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")

    def infer(x: Any) -> float:
        tensor.set_data_from_numpy(x)
        return float(client.infer("negation", [tensor]).as_numpy("y")[0, 0])

    return infer


def infer_by_handle(handle: Any, x: Any) -> float:
    """Asks by a Serve handle."""
    return float(handle.run.remote({"x": x}).result(timeout_s=120)["y"][0, 0])


class Storm:
    """Sends requests and kills the processes that answer them.

    Args:
        cluster: Where Serve has the application `storm`.
        options: Settings of the storm.
    """

    def __init__(self, cluster: FaultyCluster, options: StormOptions) -> None:
        self._cluster, self._options = cluster, options
        self.report, self.requests = StormReport(), options.requests
        self._lock = threading.Lock()

    def run(
        self, handle: Any, *, kills: bool, retries: int, expected: Callable[[float], Sequence[float]]
    ) -> None:
        """Makes all requests.

        Args:
            handle: A Serve handle of the application.
            kills: Whether replicas and nodes are killed meanwhile.
            retries: How often a request is tried again.
            expected: The right answers to a request.
        """
        half, started, before = self.requests // 2, time.monotonic(), self._count_told()
        clients: dict[str, Callable[[], Infer]] = {
            "http": lambda: infer_by_http(self._options.http_port),
            "handle": lambda: functools.partial(infer_by_handle, handle),
        }
        threads = []
        for (way, connect), first in zip(clients.items(), (1, half + 1), strict=True):
            turns = iter(range(first, first + half))
            threads += [
                threading.Thread(target=self._ask, args=(way, connect, turns, retries, expected))
                for _ in range(THREADS)
            ]
        for thread in threads:
            thread.start()
        if kills:  # here, since Ray adds nodes from the main thread alone
            self._kill(lambda: any(thread.is_alive() for thread in threads))
        for thread in threads:
            thread.join()
        self.report.seconds += time.monotonic() - started
        told = self._count_told() - before
        if told != 2 * half:
            self.report.lost.append(f"nobody knows of {2 * half - told} requests")

    def _count_told(self) -> int:
        return sum(self.report.answered.values()) + len(self.report.lost)

    def _ask(
        self,
        way: str,
        connect: Callable[[], Infer],
        turns: Iterator[int],
        retries: int,
        expected: Callable[[float], Sequence[float]],
    ) -> None:
        """Makes requests, one after the other, and repeats those that fail."""
        infer = connect()
        while True:
            with self._lock:
                number = next(turns, None)
            if number is None:
                return
            answer, reason = None, ""
            for _ in range(retries + 1):
                try:
                    answer = infer(np.full((1, 4), number, np.float32))
                    break
                except Exception as error:  # noqa: BLE001 - whatever a client raises, it is tried again
                    reason = f"{type(error).__name__}: {error}"[:200]
                    with self._lock:
                        self.report.repeated[reason.splitlines()[0][:60]] += 1
                    time.sleep(0.1)
            self._count(way, number, answer, expected, reason=reason)

    def _count(
        self,
        way: str,
        number: int,
        answer: float | None,
        expected: Callable[[float], Sequence[float]],
        *,
        reason: str,
    ) -> None:
        with self._lock:
            if answer is None:
                self.report.lost.append(f"{way} {number}: {reason}")
            else:
                self.report.answered[way] += 1
                self.report.wrong += answer not in expected(float(number))

    def _kill(self, goes_on: Callable[[], bool]) -> None:
        chance, options = random.Random(0), self._options
        next_replica, next_node = options.kill_replica_every, options.kill_node_every
        while goes_on():
            time.sleep(0.02)
            answered = sum(self.report.answered.values())
            replicas = find_replicas() if answered >= next_replica else []
            if replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(replicas), signal.SIGKILL)
                    self.report.replicas_killed += 1
                next_replica += options.kill_replica_every
            if answered >= next_node:
                self._cluster.kill_node(chance.choice(self._cluster.nodes))
                self.report.nodes_killed += 1
                self._cluster.add_node()
                next_node += options.kill_node_every


@contextmanager
def serving(options: StormOptions) -> Iterator[RayNodes]:
    """A cluster whose head runs Serve's controller and proxy, and no replica; and nodes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _SOON})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        http = {"host": "127.0.0.1", "port": options.http_port}
        serve.start(proxy_location="HeadOnly", http_options=http)
        nodes = RayNodes(cluster)
        for _ in range(options.nodes):
            nodes.add_node()
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def deploy(bundle: Path, replicas: int) -> Any:
    """Deploys the model, or updates it; returns a handle once all replicas have this version."""
    from ray import serve

    from ortprep.ray_inference.config import ServeConfig
    from ortprep.ray_inference.deployment import build_application
    from ortprep.ray_inference.pinning import pin_version

    _, pinned = pin_version(str(bundle))
    config = ServeConfig(replicas=replicas, cpus=0.5, max_queued_requests=-1, health_check_period_s=2.0)
    app = build_application(config, {"negation": pinned}, on_gpu=False)
    return serve.run(app, name="storm", route_prefix="/")


def run_storm(cluster: FaultyCluster, bundle: Path, other: Path, options: StormOptions) -> dict[str, Any]:
    """Runs both parts and returns the results of their requests.

    Args:
        cluster: With Serve on it, and as many nodes as `options` say.
        bundle: `y = -x`.
        other: `y = x + x`, with the same inputs and outputs.
        options: Settings of the storm.
    """
    storm = Storm(cluster, options)
    handle = deploy(bundle, options.nodes)
    storm.run(handle, kills=True, retries=RETRIES, expected=lambda x: [-x])
    faults, storm.report = storm.report, StormReport()
    storm.requests = options.requests // UPDATE_SHARE
    updater = threading.Timer(0.5, deploy, (other, options.nodes))
    updater.daemon = True  # if the storm fails
    updater.start()
    while updater.is_alive():
        storm.run(handle, kills=False, retries=0, expected=lambda x: [-x, 2 * x])
    last = infer_by_handle(handle, np.full((1, 4), 3, np.float32))
    return {
        "faults": vars(faults),
        "update": {**vars(storm.report), "new_version_answers": last == 6.0},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the storm and reports; returns 1 if a request was lost, or answered wrongly."""
    from bench.ray_serving import prepare_small

    parser = argparse.ArgumentParser(prog="python -m bench.ray_faults", description=__doc__)
    parser.add_argument("--requests", type=int, default=StormOptions.requests, metavar="N")
    parser.add_argument("--nodes", type=int, default=StormOptions.nodes, metavar="N")
    parser.add_argument(
        "--kill-replica-every", type=int, default=StormOptions.kill_replica_every, metavar="N"
    )
    parser.add_argument("--kill-node-every", type=int, default=StormOptions.kill_node_every, metavar="N")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    parser.add_argument("--http-port", type=int, default=StormOptions.http_port, metavar="PORT")
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    options = StormOptions(**given)
    try:
        with tempfile.TemporaryDirectory() as folder:
            versions = [prepare_small(Path(folder) / name, name) for name in ("Neg", "Add")]
            with serving(options) as cluster:
                report = run_storm(cluster, versions[0], versions[1], options)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    report = {"question": __doc__, "machine": describe_machine(), "options": vars(options), **report}
    text = format_results(report)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)
    parts = (report["faults"], report["update"])
    return 1 if any(part["lost"] or part["wrong"] for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
