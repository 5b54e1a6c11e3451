"""How fast are publish and pull, and what does a small change move? `python -m bench.registry`.

Uses a bundle of 1 GiB of random weights in two variants. Compares `publish` and `pull` in a folder, digests
included, with `cp` of the same files; and through Debian's docker-registry on this machine with one HTTP
stream each way of the same bytes. Rounds are interleaved, and each pull goes into a new folder.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.result_file import describe_machine, format_results
from ortprep.bundle.digest import DigestCache
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from tests.registry.builders import BARE, HERE, Build, Made, write_bundle
from tests.registry.servers import oci_server

GOAL_SPEED, GOAL_MOVED = 0.6, 0.01
NAME = "large"
BLOCK = 4 * 2**20


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds an action takes, with what was written before out of the way."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy(bundle: Path, destination: Path, *, sync: bool = False) -> None:
    """Copies the files, as people do without a registry."""
    subprocess.run(["cp", "-r", str(bundle), str(destination)], check=True)
    if sync:
        files = [str(path) for path in destination.rglob("*") if path.is_file()]
        subprocess.run(["sync", *files], check=True)


def put_stream(server: str, repository: str, bundle: Path) -> None:
    """Uploads one file after the other in one stream each, to the same registry, without checks before."""
    parts = urlsplit(server)
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        connection = http.client.HTTPConnection(parts.netloc, timeout=120)
        connection.request("POST", f"/v2/{repository}/blobs/uploads/")
        answer = connection.getresponse()
        answer.read()
        location = urlsplit(answer.headers["Location"])
        digest = hashlib.file_digest(path.open("rb"), "sha256").hexdigest()
        target = f"{location.path}?{location.query}&digest=sha256:{digest}"
        with path.open("rb") as file:
            headers = {"Content-Length": str(path.stat().st_size), "Content-Type": "application/octet-stream"}
            connection.request("PUT", target, body=file, headers=headers)
            answer = connection.getresponse()
            answer.read()
        assert answer.status == 201, answer.status
        connection.close()


def get_stream(server: str, repository: str, bundle: Path, destination: Path) -> None:
    """Downloads the same files, unchecked."""
    destination.mkdir()
    for number, path in enumerate(sorted(path for path in bundle.rglob("*") if path.is_file())):
        digest = DigestCache().digest(path)
        with (
            urllib.request.urlopen(f"{server}/v2/{repository}/blobs/{digest}", timeout=120) as answer,
            (destination / str(number)).open("wb") as file,
        ):
            shutil.copyfileobj(answer, file, BLOCK)


def publish_once(url: str, bundle: Path, label: str) -> int:
    """Publishes as the command does; returns the bytes sent."""
    with open_catalogue(url) as catalogue:
        return publish(bundle, catalogue, label=label).uploaded_bytes


def pull_once(url: str, out: Path) -> None:
    """Pulls as the command does, into a new folder."""
    with open_catalogue(url) as catalogue:
        pull(PullRequest(VersionRef(NAME, None)), catalogue, out, hardware=BARE)


def run_round(work: Path, bundle: Path, server: str, number: int) -> dict[str, float]:
    """Returns the seconds of each way, in one round; what was written is removed before the next."""
    folder = work / f"round{number}"
    repository = f"plain{number}/{NAME}"
    oci = f"oci+{server}/bench{number}"
    ways: list[tuple[str, Callable[[], object]]] = [
        ("cp", lambda: copy(bundle, folder / "cp")),
        ("folder: publish", lambda: publish_once(str(work / f"r{number}"), bundle, "a")),
        ("cp and sync", lambda: copy(bundle, folder / "cps", sync=True)),
        ("folder: pull", lambda: pull_once(str(work / f"r{number}"), folder / "out")),
        ("http: put", lambda: put_stream(server, repository, bundle)),
        ("oci: publish", lambda: publish_once(oci, bundle, "a")),
        ("http: get", lambda: get_stream(server, repository, bundle, folder / "get")),
        ("oci: pull", lambda: pull_once(oci, folder / "out2")),
    ]
    seconds: dict[str, float] = {}
    for what, action in ways:
        folder.mkdir()
        seconds[what] = timed(action)
        shutil.rmtree(folder)
    shutil.rmtree(work / f"r{number}")
    return seconds


def measure_small_change(work: Path, build: Build, bundle: Path, server: str) -> dict[str, float]:
    """Returns the share of bytes that a second version moves when one small file differs, by registry."""
    other = write_bundle(work / "changed", build, graph=b"changed", created_at="2026-11-21T00:00:00+00:00")
    shares = {}
    for kind, url in (("folder", str(work / "small")), ("oci", f"oci+{server}/small")):
        first = publish_once(url, bundle, "one")
        shares[kind] = publish_once(url, other, "two") / first
    return shares


PAIRS = (
    ("folder: publish", "cp"),
    ("folder: publish", "cp and sync"),
    ("folder: pull", "cp"),
    ("folder: pull", "cp and sync"),
    ("oci: publish", "http: put"),
    ("oci: pull", "http: get"),
)


def main() -> None:
    """Measures, prints the table, writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="Size of the bundle.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="Where to work: on the disk to be measured, or in memory."
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        work = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ortprep-bench-", dir=arguments.folder))
        )
        os.environ["ORTPREP_CACHE_DIR"] = str(work / "digests")
        half = arguments.mib * 2**19
        made = (Made("cpu", HERE, os.urandom(half)), Made("portable", weights=os.urandom(half)))
        build = Build(made, name=NAME)
        bundle = write_bundle(work / "bundle", build)
        # On a disk in any case: it keeps what every round sends, which would take all memory.
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ortprep-bench-")))
        server = stack.enter_context(oci_server(storage)).url
        rounds = [run_round(work, bundle, server, number) for number in range(arguments.rounds)]
        shares = measure_small_change(work, build, bundle, server)
    results = summarise(rounds, shares, arguments.mib)
    for line in describe(results):
        print(line)
    if arguments.out:
        arguments.out.write_text(format_results(results) + "\n", encoding="utf-8")


def summarise(rounds: list[dict[str, float]], shares: dict[str, float], mib: int) -> dict[str, Any]:
    """Returns medians, and the speed of each way relative to the plain one, round by round."""
    ratios = {
        f"{own} against {plain}": sorted(one[plain] / one[own] for one in rounds) for own, plain in PAIRS
    }
    return {
        "machine": describe_machine(),
        "mib": mib,
        "rounds": rounds,
        "median_s": {what: median(one[what] for one in rounds) for what in rounds[0]},
        "speed_ratio": {
            what: {"median": median(found), "lowest": found[0], "highest": found[-1]}
            for what, found in ratios.items()
        },
        "moved_by_a_small_change": shares,
        "goals": {"speed_ratio": GOAL_SPEED, "moved": GOAL_MOVED},
    }


def describe(results: dict[str, Any]) -> list[str]:
    """Returns the tables for people."""
    lines = [f"{results['mib']} MiB, median of {len(results['rounds'])} interleaved rounds"]
    lines += [f"  {what:34} {seconds:7.2f} s" for what, seconds in results["median_s"].items()]
    lines.append(f"speed relative to the plain way (goal {GOAL_SPEED})")
    lines += [
        f"  {what:52} {ratio['median']:5.2f}×  ({ratio['lowest']:.2f}–{ratio['highest']:.2f})"
        for what, ratio in results["speed_ratio"].items()
    ]
    lines.append(f"moved by a second version with one small file changed (goal {GOAL_MOVED:.0%})")
    lines += [f"  {kind:34} {share:7.4%}" for kind, share in results["moved_by_a_small_change"].items()]
    return lines


if __name__ == "__main__":
    main()
