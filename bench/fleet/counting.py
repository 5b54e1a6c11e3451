"""Counts the requests of a publish at real registries: a folder, S3 (moto), OCI (Debian's)."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression
from typing import Any
from unittest import mock

import requests

from bench.fleet.calibration import RequestCost
from ortprep.bundle.loader_config import Requirements, VersionRange
from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.references import open_registry
from tests.registry.backends.oci.fakes import oci_server
from tests.registry.builders import CPU, Build, Made, write_bundle
from tests.registry.fakes import BUCKET, s3_server

KINDS = 5
_OCI = re.compile(r"/v2/.*?/(manifests|blobs/uploads|blobs|tags)")
_OCI_NAMES = {"manifests": "manifest", "blobs/uploads": "upload", "blobs": "blob", "tags": "tags"}
_MOTO = re.compile(r'"(?:\x1b\[[0-9;]*m)*([A-Z]+) /' + BUCKET)  # some answers are logged in colour


class CountingBackend:
    """A registry's backend that counts what is asked of it, each call as one request.

    Args:
        url: The registry.
        delay_s: Added latency of every call, in seconds.
    """

    def __init__(self, url: str, *, delay_s: float = 0.0) -> None:
        self._backend = open_registry(url)
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*arguments: object) -> object:
            with self._lock:
                self.calls[name] += 1
            time.sleep(self._delay_s)
            return found(*arguments)

        return call


def make_bundle(folder: Path, *, version: int, kind: int) -> Path:
    """Writes a bundle as a machine of some kind would prepare it: its own variant, and the portable one."""
    needs = Requirements(VersionRange("1.23"), (CPU,), machine="x86_64", cpu_features=(f"kind{kind}",))
    made = (Made("cpu", needs, weights=b"w%d%d" % (version, kind)), Made("portable", weights=b"%d" % version))
    at = f"2026-11-20T00:00:{kind:02d}+00:00"
    build = Build(made, source=b"%d" % version, graph=b"%d-%d" % (version, kind), created_at=at)
    return write_bundle(folder / f"bundle-{version}-{kind}", build)


@contextmanager
def counted_http() -> Iterator[Counter[str]]:
    """Counts requests to OCI registries, by method and what they are for."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    send = requests.Session.send

    def counting(self: requests.Session, request: requests.PreparedRequest, **options: Any) -> Any:
        found = _OCI.search(request.url or "")
        with lock:
            counts[f"{request.method} {_OCI_NAMES[found[1]] if found else 'other'}"] += 1
        return send(self, request, **options)

    with mock.patch.object(requests.Session, "send", counting):
        yield counts


@contextmanager
def counted_lines(log: Path) -> Iterator[Counter[str]]:
    """Counts requests to moto's S3 server, by method, from its log; they are there when the block ends."""
    counts: Counter[str] = Counter()
    before = len(log.read_bytes())
    yield counts
    counts.update(_MOTO.findall(log.read_bytes()[before:].decode()))


def count_folder(folder: Path, versions: int) -> dict[str, list[dict[str, int]]]:
    """Returns the calls of each publish: of several versions in turn, and of one by five kinds at once."""

    def run(url: str, bundle: Path, cache: Path) -> dict[str, int]:
        backend = CountingBackend(url)
        publish(bundle, Catalogue(backend, Cache(cache)))
        backend.calls.pop("close", None)
        return dict(backend.calls)

    bundles = [[make_bundle(folder, version=v, kind=k) for k in range(KINDS)] for v in range(versions)]
    in_turn = [
        run(str(folder / "turn"), bundle, folder / f"cache-{bundle.name}")
        for one in bundles
        for bundle in one
    ]
    with ThreadPoolExecutor(KINDS) as pool:
        at_once = list(
            pool.map(lambda b: run(str(folder / "once"), b, folder / f"other-{b.name}"), bundles[0])
        )
    return {"in_turn": in_turn, "at_once": at_once}


def count_served(url: str, folder: Path, versions: int, counted: Any) -> dict[str, list[dict[str, int]]]:
    """As `count_folder`, by the requests that reach a server; five at once are counted together."""

    def run(prefix: str, bundle: Path) -> None:
        with open_catalogue(f"{url}/{prefix}", cache=Cache(folder / f"cache-{prefix}-{bundle.name}")) as one:
            publish(bundle, one)

    bundles = [[make_bundle(folder, version=v, kind=k) for k in range(KINDS)] for v in range(versions)]
    in_turn = []
    for bundle in (bundle for one in bundles for bundle in one):
        with counted() as counts:
            run("turn", bundle)
        in_turn.append(dict(counts))
    with counted() as counts, ThreadPoolExecutor(KINDS) as pool:
        list(pool.map(lambda bundle: run("once", bundle), bundles[0]))
    return {"in_turn": in_turn, "at_once": [dict(counts)]}


def count_all(versions: int = 4) -> dict[str, dict[str, list[dict[str, int]]]]:
    """Returns what was counted, by kind of registry."""
    with tempfile.TemporaryDirectory(prefix="ortprep-bench-") as name:
        folder = Path(name)
        places = {kind: folder / kind for kind in ("folder", "oci", "s3")}
        for place in places.values():
            place.mkdir()
        found = {"folder": count_folder(places["folder"], versions)}
        with oci_server(folder / "registry") as server:
            found["oci"] = count_served(f"oci+{server.url}", places["oci"], versions, counted_http)
        with s3_server(folder) as url:
            variables = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
            }
            log = folder / "moto.log"
            with mock.patch.dict(os.environ, variables):
                found["s3"] = count_served(
                    f"s3://{BUCKET}", places["s3"], versions, lambda: counted_lines(log)
                )
        return found


def fit_requests(
    in_turn: Sequence[Mapping[str, int]], at_once: Sequence[Mapping[str, int]]
) -> dict[str, RequestCost]:
    """Returns the cost of a publish by kind of request: a line over the parts that were there before.

    The rest of what five at once took is laid on each pair of them.
    """
    costs = {}
    parts = list(range(len(in_turn)))
    for kind in sorted({kind for one in (*in_turn, *at_once) for kind in one}):
        seen = [one.get(kind, 0) for one in in_turn]
        # The very first also makes what all later ones share: the line is for those.
        slope, base = linear_regression(parts[1:], seen[1:])
        alone = sum(seen[:KINDS])
        together = sum(one.get(kind, 0) for one in at_once)
        pairs = KINDS * (KINDS - 1) / 2
        costs[kind] = RequestCost(
            round(max(base, 0.0), 2), round(slope, 3), max(0.0, together - alone) / pairs
        )
    return costs


def time_publish(delay_s: float) -> float:
    """Returns the seconds that publishing a small bundle takes where every call takes `delay_s` longer."""
    with tempfile.TemporaryDirectory(prefix="ortprep-bench-") as name:
        folder = Path(name)
        backend = CountingBackend(str(folder / "registry"), delay_s=delay_s)
        bundle = make_bundle(folder, version=0, kind=0)
        started_s = time.monotonic()
        publish(bundle, Catalogue(backend, Cache(folder / "cache")))
        return time.monotonic() - started_s
