"""What does serving on a Ray cluster cost, compared with serving without one? `python -m bench.ray_serving`.

Sends small requests to `SessionPool`, to a bundle's Serve handle on one node, and to a Ray actor and a Serve
deployment that do nothing. Runs a dataset of 10,000 images through `OnnxPredictor`, through a loop over the
same batches with the same session, and through Ray Data with a class that does nothing. Every round is a
fresh process with its own Ray cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import prepare_command
from bench.pool import blocking, windowed
from bench.result_file import describe_machine, format_results
from ortprep.bundle.loader_config import read_loader_config
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, StageError

GOALS = {
    "small_one_at_a_time_of_handle": ("<=", 1.3),
    "dataset_rate": (">=", 0.9),
}
"""What each figure is to reach. Of small requests: what one costs at a time, divided by what it costs by the
handle of a deployment that does nothing. Of the dataset: rows a second by `OnnxPredictor`, start-up included,
divided by those of the loop by hand, its load included."""

SMALL = (1, 1024)
REQUESTS = 4000
ROWS = 10_000
BATCH = 64
IMAGE = (3, 224, 224)

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


# Small requests.


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

    from ortprep.ray_inference import ServeConfig
    from ortprep.ray_inference.deployment import build_application
    from ortprep.ray_inference.pinning import pin_version
    from ortprep.runtime import PoolConfig, SessionPool

    x, requests = np.ones(SMALL, np.float32), request["requests"]
    with (
        ray_of_one_node() as ray,
        SessionPool(request["bundle"], PoolConfig(devices="cpu", threads=1)) as local,
    ):
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
            "session_pool": _way(lambda: local.submit({"x": x}), lambda: local.run({"x": x}), requests),
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


# A dataset.


@functools.cache
def _some_images() -> Array:
    return np.random.default_rng(0).random((64, *IMAGE), np.float32)


def make_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the images of some rows, by hand and in the dataset alike."""
    return {"data_0": _some_images()[np.asarray(batch["id"]) % 64]}


class Nothing:
    """Answers without a model."""

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer of the size of the model's."""
        return {"softmaxout_1": np.zeros((len(batch["data_0"]), 1000, 1, 1), np.float32)}


def classify_by_hand(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child: a loop over the batches.

    Args:
        request: `bundle`, `rows`.
    """
    from ortprep.runtime.loading.model_load_options import ModelLoadOptions
    from ortprep.runtime.opened_model import open_model

    started = time.perf_counter()
    session = open_model(request["bundle"], ModelLoadOptions(threads=1)).session
    (name,) = (output.name for output in session.get_outputs())
    marks, total = [], 0.0
    for begin in range(0, request["rows"], BATCH):
        images = make_images({"id": np.arange(begin, min(begin + BATCH, request["rows"]))})["data_0"]
        answers = [session.run([name], {"data_0": images[n : n + 1]})[0] for n in range(len(images))]
        total += _sum_up(np.concatenate(answers))
        marks.append((time.perf_counter(), len(images)))
    return _describe_run(started, marks, total)


def classify_dataset(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child: the same rows through Ray Data.

    Args:
        request: `bundle`, `rows`; `bundle` is None for a class that does nothing.
    """
    from ortprep.ray_inference import OnnxPredictor
    from ortprep.runtime.loading.model_load_options import ModelLoadOptions

    with ray_of_one_node() as ray:
        import ray.data as data

        data.DataContext.get_current().enable_progress_bars = False
        del ray
        started = time.perf_counter()
        # Ray Data has the images made by the actor that has the model, as the loop makes them by hand.
        images = data.range(request["rows"], override_num_blocks=50).map_batches(
            make_images, batch_size=BATCH
        )
        model: Any = Nothing if request["bundle"] is None else OnnxPredictor
        arguments = None
        if request["bundle"] is not None:
            arguments = {"bundle": request["bundle"], "load": ModelLoadOptions(threads=1)}
        answers = images.map_batches(
            model, fn_constructor_kwargs=arguments, batch_size=BATCH, concurrency=1, num_cpus=1
        )
        marks, total = [], 0.0
        for batch in answers.iter_batches(batch_size=BATCH):
            total += _sum_up(batch["softmaxout_1"])
            marks.append((time.perf_counter(), len(batch["softmaxout_1"])))
    return _describe_run(started, marks, total)


def _sum_up(answers: Array) -> float:
    """Returns a number that depends on every answer, where their sums are all 1."""
    rows = answers.reshape(len(answers), -1)
    return float((rows.astype(np.float64) @ np.arange(rows.shape[1])).sum())


def _describe_run(started: float, marks: Sequence[tuple[float, int]], total: float) -> dict[str, Any]:
    rows = sum(count for _, count in marks)
    seconds, first_s = marks[-1][0] - started, marks[0][0] - started
    steady_s = marks[-1][0] - marks[0][0]
    return {
        "rows": rows,
        "seconds": seconds,
        "first_batch_s": first_s,
        "rows_per_s": rows / seconds,
        "rows_per_s_after_the_first_batch": (rows - marks[0][1]) / steady_s,
        "checksum": total,
    }


# All of it.


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


def collect_dataset(bundle: Path, rounds: int, rows: int) -> dict[str, Any]:
    """Measures a dataset in fresh processes, the ways in turn."""
    ways = {
        "by_hand": (classify_by_hand, str(bundle)),
        "predictor": (classify_dataset, str(bundle)),
        "nothing": (classify_dataset, None),
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (function, path) in ways.items():
            request = {"bundle": path, "rows": rows}
            found[way].append(run_child(function, request, timeout_s=1800).value)
    hand, ray = found["by_hand"], found["predictor"]
    key = "rows_per_s_after_the_first_batch"
    return {
        "rows": rows,
        "batch": BATCH,
        "runs": found,
        "rate_ratio": median(r["rows_per_s"] / h["rows_per_s"] for r, h in zip(ray, hand, strict=True)),
        "rate_ratio_after_the_first_batch": median(r[key] / h[key] for r, h in zip(ray, hand, strict=True)),
        "largest_difference_of_checksums": max(
            abs(r["checksum"] - h["checksum"]) for r, h in zip(ray, hand, strict=True)
        ),
    }


def is_reached(name: str, value: float) -> bool:
    """Says whether a figure reaches its goal."""
    sign, goal = GOALS[name]
    return value >= goal if sign == ">=" else value <= goal


def measure(artifacts: Path, model: Path, *, processes: int, rounds: int, rows: int) -> dict[str, Any]:
    """Measures everything."""
    small = collect_small(prepare_small(artifacts), processes)
    dataset = collect_dataset(model, rounds, rows)
    figures = {
        "small_one_at_a_time_of_handle": small["one_at_a_time"]["of_serve_handle"],
        "dataset_rate": dataset["rate_ratio"],
    }
    import ray

    return {
        "question": "what does serving on a Ray cluster cost beside serving without one?",
        "machine": {**describe_machine(), "ray": ray.__version__},
        "goals": {name: f"{sign} {value:g}" for name, (sign, value) in GOALS.items()},
        "figures": figures,
        "missed": [name for name, value in figures.items() if not is_reached(name, value)],
        "small": small,
        "dataset": dataset,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_serving", description=__doc__)
    parser.add_argument("--processes", type=int, default=3, choices=range(1, 20), metavar="N")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 20), metavar="N", help="datasets")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts/bench"))
    parser.add_argument(
        "--model", type=Path, default=Path("artifacts/squeezenet"), help="a prepared SqueezeNet"
    )
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    try:
        read_loader_config(options.model)  # needed minutes later
        report = measure(
            options.artifacts.absolute(),
            options.model.absolute(),
            processes=options.processes,
            rounds=options.rounds,
            rows=options.rows,
        )
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.out:
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    for name, value in report["figures"].items():
        verdict = "reached" if is_reached(name, value) else "MISSED"
        print(f"{name:<32} {value:>10.3g}   goal {report['goals'][name]:<8} {verdict}")
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
