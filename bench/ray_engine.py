"""What does the cluster's engine add to a stage? `python -m bench.ray_engine [--rounds 5] [--models 3]`.

Starts an idle cluster of one node on this machine (a raylet beside a head that runs nothing). Prepares the
same small models with both engines alternately, each time from nothing, in a fresh process. The models are as
small as possible, since the question is what Ray, the work store and publishing add. Joining the cluster
happens once per run and is reported separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.noop import ROOT, write_project
from bench.result_file import describe_machine, format_results

_CHILD = """
import json, sys, time
started = time.perf_counter()
from pathlib import Path
from ortprep.cli.progress import BuildObserver
from ortprep.build.runner import BuildRequest, build_here
wanted = json.loads(sys.argv[1])
order = BuildRequest(configs=Path(wanted["configs"]), artifacts=Path(wanted["artifacts"]))
joined_s = 0.0
if wanted["address"] is None:
    build = build_here
else:
    import ray
    before = time.perf_counter()
    ray.init(address=wanted["address"], log_to_driver=False, logging_level="error")
    joined_s = time.perf_counter() - before
    from ortprep.cluster.building.engine import RayEngine
    build = RayEngine(store=wanted["store"]).prepare
begun = time.perf_counter()
errors = build(order, BuildObserver())
assert not errors, errors
ended = time.perf_counter()
assert not build(order, BuildObserver())
print(json.dumps({"prepare_s": ended - begun, "noop_s": time.perf_counter() - ended, "join_s": joined_s}))
"""


def run_engine(folder: Path, address: str | None) -> dict[str, float]:
    """Prepares from nothing in a fresh process; returns seconds, and those that stages took themselves."""
    wanted = {
        "configs": str(folder / "configs"),
        "artifacts": str(folder / "artifacts"),
        "store": str(folder / "store"),
        "address": address,
    }
    command = [sys.executable, "-c", _CHILD, json.dumps(wanted)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    # Fetching is the driver's, with both engines.
    receipts = [
        json.loads(path.read_text()) for path in (folder / "artifacts" / ".work").rglob("receipts/*.json")
    ]
    for path in (folder / "store" / "work").glob("*/outcomes/*/*.json"):
        receipts += json.loads(path.read_text())["receipts"]
    found["stages_s"] = sum(receipt["elapsed_s"] for receipt in receipts)
    found["stages"] = len(receipts)
    return found


def start_cluster() -> Any:
    """Starts a head that runs nothing, and a node."""
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = {"object_store_memory": 100_000_000}
        cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small}
        )
        cluster.add_node(num_cpus=2, **small)
    return cluster


def summarise(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Returns medians with the lowest and highest, in seconds."""

    def of(values: Sequence[float]) -> list[float]:
        return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]

    stages = rounds[0]["ray"]["stages"]
    outside = {
        engine: [(one[engine]["prepare_s"] - one[engine]["stages_s"]) / stages for one in rounds]
        for engine in ("doit", "ray")
    }
    return {
        "stages": stages,
        "prepare_s": {engine: of([one[engine]["prepare_s"] for one in rounds]) for engine in ("doit", "ray")},
        "noop_s": {engine: of([one[engine]["noop_s"] for one in rounds]) for engine in ("doit", "ray")},
        "join_s": of([one["ray"]["join_s"] for one in rounds]),
        "outside_stages_s_per_stage": {engine: of(values) for engine, values in outside.items()},
        "added_s_per_stage": of(
            [ray - doit for ray, doit in zip(outside["ray"], outside["doit"], strict=True)]
        ),
        "added_s_per_stage_by_wall": of(
            [(one["ray"]["prepare_s"] - one["doit"]["prepare_s"]) / stages for one in rounds]
        ),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "ray_engine.json")
    arguments = parser.parse_args()
    cluster = start_cluster()
    rounds = []
    try:
        time.sleep(3)
        for number in range(arguments.rounds):
            found = {}
            for engine in ("doit", "ray") if number % 2 == 0 else ("ray", "doit"):
                with tempfile.TemporaryDirectory() as name:
                    write_project(Path(name), arguments.models)
                    found[engine] = run_engine(Path(name), cluster.address if engine == "ray" else None)
            rounds.append(found)
    finally:
        cluster.shutdown()
    result = {"models": arguments.models, "rounds": arguments.rounds, **summarise(rounds)}
    result["machine"] = describe_machine()
    arguments.out.write_text(format_results(result) + "\n")
    for key, value in result.items():
        if key != "machine":
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
