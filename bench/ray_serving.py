"""What does serving on a Ray cluster cost, compared with serving without one? `python -m bench.ray_serving`.

Sends small requests to `SessionPool`, to a bundle's Serve handle on one node, and to a Ray actor and a Serve
deployment that do nothing. Every round is a fresh process with its own Ray cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import prepare_command
from bench.pool import blocking, windowed
from bench.result_file import describe_machine, format_results
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, StageError

GOAL = 1.3
"""Limit of what a small request costs, one at a time, divided by what it costs by the handle of a deployment
that does nothing."""

SMALL = (1, 1024)
REQUESTS = 4000

Array = NDArray[np.float32]

_NEGATION = """\
name: negation
source: {path: negation.onnx}
inputs: {x: {shapes: [[1, 1024]]}}
targets: [cpu]
runtime: {intra_op_num_threads: 1}
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 0, steady_s: 0.1}
"""


def prepare_small(artifacts: Path, operator: str = "Neg") -> Path:
    """Builds the bundle of a model that does next to nothing, and returns its folder.

    Args:
        artifacts: Where to.
        operator: `Neg`, or `Add` for the sum of the input with itself.

    Raises:
        StageError: The command failed.
    """
    import onnx
    from onnx import TensorProto, helper

    configs = artifacts / "configs-ray"
    configs.mkdir(parents=True, exist_ok=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "n"]) for name in "xy")
    inputs = ["x"] if operator == "Neg" else ["x", "x"]
    graph = helper.make_graph([helper.make_node(operator, inputs, ["y"])], "negation", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, configs / "negation.onnx")
    (configs / "negation.yaml").write_text(_NEGATION, encoding="utf-8")
    command = prepare_command(configs, artifacts, ["negation"])
    if subprocess.run(command, check=False).returncode:
        raise StageError("cannot prepare the benchmark's model", hint=" ".join(command))
    return artifacts / "negation"


@contextmanager
def ray_of_one_node() -> Iterator[Any]:
    """A cluster that is this machine alone, with two processors."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    store = 2 * 2**30
    # Not the cluster that somebody else may have running here.
    ray.init("local", num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


class Echo:
    """An actor, or a deployment, that does nothing."""

    def run(self, x: Array) -> Array:
        """Returns its argument."""
        return x


def ask_handle(handle: Any, x: Any, requests: int, in_flight: int) -> float:
    """Returns the seconds that so many requests take by a Serve handle, so many at a time."""

    async def ask() -> None:
        room = asyncio.Semaphore(in_flight)

        async def one() -> None:
            async with room:
                await handle.remote(x)

        await asyncio.gather(*(one() for _ in range(requests)))

    started = time.perf_counter()
    asyncio.run(ask())
    return time.perf_counter() - started


Way = Mapping[str, Callable[[], float]]


def _way(submit: Callable[[], Any], call: Callable[[], Any], requests: int) -> Way:
    """Returns how a way is measured, by the kind of caller; the seconds of so many requests."""
    return {
        "window": lambda: windowed(submit, requests, 64),
        "threads": lambda: blocking(call, requests, 16),
        "one_at_a_time": lambda: blocking(call, requests // 4, 1) * 4,
    }


def measure_small(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child: the same small requests in four ways, in turn.

    Args:
        request: `bundle`, `requests`, `rounds`.

    Returns:
        Microseconds per request, by how they are made and by way, a list each.
    """
    from ray import serve

    from ortprep.ray_inference.config import ServeConfig
    from ortprep.ray_inference.deployment import build_application
    from ortprep.ray_inference.pinning import pin_version
    from ortprep.runtime import PoolConfig, SessionPool

    x, requests = np.ones(SMALL, np.float32), request["requests"]
    with (
        ray_of_one_node() as ray,
        SessionPool(request["bundle"], PoolConfig(devices="cpu", threads=1)) as local,
    ):
        threads = ThreadPoolExecutor(4)
        echo = ray.remote(num_cpus=0.5)(Echo).remote()
        # As many at a time as there are requests, so that nobody is turned away.
        deployment = serve.deployment(Echo).options(
            max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.5}
        )
        handle = serve.run(deployment.bind(), name="echo", route_prefix=None).run
        bundles = dict([pin_version(request["bundle"])])
        config = ServeConfig(cpus=0.5, max_ongoing_requests=100)
        app = build_application(config, bundles, on_gpu=False)
        served = serve.run(app, name="bundle", route_prefix=None).run
        ways: dict[str, Way] = {
            "session_pool": _way(
                lambda: threads.submit(local.run, {"x": x}), lambda: local.run({"x": x}), requests
            ),
            "bare_actor": _way(
                lambda: echo.run.remote(x).future(), lambda: ray.get(echo.run.remote(x)), requests
            ),
            "serve_handle": {
                **_way(lambda: None, lambda: handle.remote(x).result(), requests),
                "window": lambda: ask_handle(handle, x, requests, 64),
            },
            "bundle_handle": {
                **_way(lambda: None, lambda: served.remote({"x": x}).result(), requests),
                "window": lambda: ask_handle(served, {"x": x}, requests, 64),
            },
        }
        kinds = ("window", "threads", "one_at_a_time")
        found: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in ways} for kind in kinds}
        for turn in range(request["rounds"] + 1):
            for kind in kinds:
                for way, measures in ways.items():
                    seconds = measures[kind]()
                    if turn:  # the first warms up
                        found[kind][way].append(seconds / requests * 1e6)
    return found


def _spread(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    low, _, high = quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {"median": median(ordered), "quartiles": [low, high], "values": list(values)}


def collect_small(bundle: Path, processes: int) -> dict[str, Any]:
    """Measures small requests in fresh processes."""
    request = {"bundle": str(bundle), "requests": REQUESTS, "rounds": 3}
    found = [run_child(measure_small, request, timeout_s=900).value for _ in range(processes)]
    report: dict[str, Any] = {}
    for kind in found[0]:
        ways = {way: [value for one in found for value in one[kind][way]] for way in found[0][kind]}
        bundle_us = ways["bundle_handle"]
        report[kind] = {
            "us_per_request": {way: _spread(values) for way, values in ways.items()},
            "of_serve_handle": median(r / s for r, s in zip(bundle_us, ways["serve_handle"], strict=True)),
        }
    return report


def measure(artifacts: Path, processes: int) -> dict[str, Any]:
    """Measures everything."""
    small = collect_small(prepare_small(artifacts), processes)
    import ray

    return {
        "question": "what does serving on a Ray cluster cost beside serving without one?",
        "machine": {**describe_machine(), "ray": ray.__version__},
        "goal": GOAL,
        "figure": small["one_at_a_time"]["of_serve_handle"],
        "small": small,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and reports; returns 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_serving", description=__doc__)
    parser.add_argument("--processes", type=int, default=3, choices=range(1, 20), metavar="N")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    try:
        report = measure(options.artifacts.absolute(), options.processes)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.out:
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    missed = report["figure"] > GOAL
    print(f"one at a time, of a handle: {report['figure']:.3g}; goal {GOAL}{', MISSED' if missed else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
