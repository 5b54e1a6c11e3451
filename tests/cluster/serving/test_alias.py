"""Replicas follow the alias they were deployed with."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.cluster import ServeConfig
from ortprep.cluster.serving.pinning import follow_aliases, pin_version
from ortprep.runtime.tensors.arrays import write_tensors
from tests.cluster.serving.builders import deployed
from tests.fakes import wait_for
from tests.prepare.builders import Project
from tests.runtime.builders import entry, sample, weights_of, write_bundle, write_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray"),
]

WATCH_S = 2.0


class Requests:
    """Makes requests one after the other, without any retry, and notes which version answered.

    Args:
        handle: A handle of the application.
    """

    def __init__(self, handle: Any) -> None:
        self.seeds: list[int] = []
        self._handle, self._ends = handle, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        expected = [sample() @ weights_of(seed) for seed in range(3)]
        while not self._ends.is_set():
            futures = [self._handle.run.remote({"x": sample()}) for _ in range(8)]
            for future in futures:
                y = future.result(timeout_s=600)["y"]
                self.seeds += [seed for seed in range(3) if np.allclose(y, expected[seed], atol=1e-4)] or [-1]

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def latest(self) -> set[int]:
        """Returns the versions of the latest answers."""
        assert self._thread.is_alive(), "a request failed"
        return set(self.seeds[-64:])


def promote(project: Project, bundle: Path, url: str) -> None:
    """Publishes a version and has `production` name it."""
    published = project.run("publish", str(bundle), "--registry", url)
    assert published.code == 0, published.err
    reason = ("--force", "--reason", "nothing was measured")
    version = published.out.strip()
    promoted = project.run("promote", version, "production", "--registry", url, *reason)
    assert promoted.code == 0, promoted.err


def write_wrong(folder: Path, seed: int) -> Path:
    """Writes a bundle whose golden sample is not what it answers."""
    write_bundle(folder, seed=seed)
    write_tensors(folder / "golden.npz", {"input:x": sample(), "output:y": 5 + sample() @ weights_of(seed)})
    config = read_loader_config(folder)
    golden = dataclasses.replace(config.golden, file=entry(folder, "golden.npz"))
    write_loader_config(folder, dataclasses.replace(config, golden=golden))
    write_record(folder)
    return folder


def test_a_promoted_version_replaces_the_one_before_unless_it_answers_wrongly(nodes, squeezenet, tmp_path):
    url = (tmp_path / "registry").as_uri()
    promote(squeezenet, write_bundle(tmp_path / "0", seed=0), url)
    config = ServeConfig(cpus=0.5, watch_s=WATCH_S)
    bundle = f"{url}/linear@production"
    with deployed(bundle, config=config, replicas=2) as handle, Requests(handle) as requests:
        replicas = nodes.replicas()
        wait_for(lambda: len(requests.seeds) > 64, what="answers come")
        assert set(requests.seeds) == {0}
        promote(squeezenet, write_bundle(tmp_path / "1", seed=1), url)
        wait_for(lambda: requests.latest() == {1}, what="the promoted version answers")
        promote(squeezenet, write_wrong(tmp_path / "2", seed=2), url)
        time.sleep(2 * WATCH_S)
        assert requests.latest() == {1}
        assert set(requests.seeds) == {0, 1}
        assert nodes.replicas() == replicas


def test_without_an_interval_the_version_stays(squeezenet, tmp_path):
    url = (tmp_path / "registry").as_uri()
    promote(squeezenet, write_bundle(tmp_path / "0", seed=0), url)
    _, pinned = pin_version(f"{url}/linear@production")
    promote(squeezenet, write_bundle(tmp_path / "1", seed=1), url)
    _, latest = pin_version(f"{url}/linear@production")
    assert latest.version != pinned.version
    for watch_s, expected in ((0.0, pinned), (1.0, latest)):
        assert follow_aliases({"linear": pinned}, ServeConfig(watch_s=watch_s)) == {"linear": expected}


def test_a_digest_and_the_latest_version_are_not_followed(squeezenet, tmp_path):
    url = (tmp_path / "registry").as_uri()
    promote(squeezenet, write_bundle(tmp_path / "0", seed=0), url)
    _, pinned = pin_version(f"{url}/linear")
    assert pinned.alias == ""
    assert pin_version(f"{url}/linear@{pinned.version}")[1] == pinned
    assert follow_aliases({"net": pinned}, ServeConfig()) == {"net": pinned}
