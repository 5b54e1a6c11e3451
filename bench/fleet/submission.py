"""How many jobs can a driver submit to Ray in a second? `python -m bench.fleet.submission`.

Starts its own Ray on this machine and submits to nodes that do not exist, with the calls of
`ortprep.cluster.building.connection`. This measures the driver, and how long it takes to check all that
wait.
"""

from __future__ import annotations

import argparse
import logging
import time


def echo(text: str) -> str:
    """Stands for a job; never runs, since no node has the resources."""
    return text


def main() -> None:
    """Submits, checks, prints."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--job-bytes", type=int, default=6000, help="Of a job's description.")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=1, log_to_driver=False, logging_level=logging.ERROR)
    text = "x" * arguments.job_bytes
    started_s = time.perf_counter()
    remote = ray.remote(max_retries=3)(echo)
    tickets = [
        remote.options(name=f"model{index}", num_cpus=1, label_selector={"kind": "no-such"}).remote(text)
        for index in range(arguments.jobs)
    ]
    handed_out_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    ray.wait(tickets, num_returns=len(tickets), timeout=0)
    looked_s = time.perf_counter() - started_s
    print(f"{arguments.jobs / handed_out_s:.0f} jobs/s handed out, {looked_s:.3f} s to look at all of them")
    ray.shutdown()


if __name__ == "__main__":
    main()
