"""Deployments on a real cluster: called by a handle, shipped by a registry, moved by an alias, and killed."""

import dataclasses
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ray import serve

from bench.ray_faults import StormOptions, run_storm
from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import IntegrityError, NotPublishedError
from ortprep.ray_inference.config import ServeConfig
from ortprep.ray_inference.pinning import follow_aliases, pin_version, require_version
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.runtime import load
from ortprep.runtime.tensors.arrays import write_tensors
from tests.fakes import wait_for
from tests.prepare.builders import Project
from tests.ray_inference.builders import deployed
from tests.ray_inference.conftest import HTTP_PORT
from tests.runtime.builders import entry, sample, weights_of, write_bundle, write_record
from tests.runtime.dropin.builders import run_python
from tests.runtime.pool.builders import write_model_bundle

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::FutureWarning:ray",
    "ignore::DeprecationWarning",
    # What gevent makes of a client that is collected in a thread other than its own.
    "ignore:Exception ignored in. <function InferenceServerClient.__del__",
)

ONE = np.ones((1, 1), np.float32)


# -- replicas follow the alias they were deployed with

WATCH_S = 2.0


class Requests:
    """Makes requests one after the other, without any retry, and notes which version answered.

    Args:
        handle: A handle of the application.
    """

    def __init__(self, handle):
        self.seeds = []
        self._handle, self._ends = handle, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self):
        expected = [sample() @ weights_of(seed) for seed in range(3)]
        while not self._ends.is_set():
            futures = [self._handle.run.remote({"x": sample()}) for _ in range(8)]
            for future in futures:
                y = future.result(timeout_s=600)["y"]
                self.seeds += [seed for seed in range(3) if np.allclose(y, expected[seed], atol=1e-4)] or [-1]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()

    def latest(self):
        """Returns the versions of the latest answers."""
        assert self._thread.is_alive(), "a request failed"
        return set(self.seeds[-64:])


def promote(project, bundle, url):
    """Publishes a version and has `production` name it."""
    published = project.call("publish", str(bundle), "--registry", url)
    assert published.code == 0, published.err
    version = published.out.strip()
    promoted = project.call("promote", version, "production", "--registry", url, "--force")
    assert promoted.code == 0, promoted.err


def write_wrong(folder, seed):
    """Writes a bundle whose golden sample is not what it answers."""
    write_bundle(folder, seed=seed)
    write_tensors(folder / "golden.npz", {"input:x": sample(), "output:y": 5 + sample() @ weights_of(seed)})
    config = read_loader_config(folder)
    golden = config.golden._replace(file=entry(folder, "golden.npz"))
    write_loader_config(folder, config._replace(golden=golden))
    write_record(folder)
    return folder


@pytest.mark.slow
def test_a_promoted_version_replaces_the_one_before_unless_it_answers_wrongly(nodes, tmp_path):
    project, url = Project(tmp_path), (tmp_path / "registry").as_uri()
    promote(project, write_bundle(tmp_path / "0", seed=0), url)
    config = ServeConfig(cpus=0.5, watch_s=WATCH_S)
    bundle = f"{url}/linear@production"
    with deployed(bundle, config=config, replicas=2) as handle, Requests(handle) as requests:
        replicas = nodes.replicas()
        wait_for(lambda: len(requests.seeds) > 64, what="answers come")
        assert set(requests.seeds) == {0}
        promote(project, write_bundle(tmp_path / "1", seed=1), url)
        wait_for(lambda: requests.latest() == {1}, what="the promoted version answers")
        promote(project, write_wrong(tmp_path / "2", seed=2), url)
        time.sleep(2 * WATCH_S)
        assert requests.latest() == {1}
        assert set(requests.seeds) == {0, 1}
        assert nodes.replicas() == replicas


def test_an_alias_is_pinned_and_followed_a_digest_and_the_latest_version_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))
    project, url = Project(tmp_path), (tmp_path / "registry").as_uri()
    promote(project, write_bundle(tmp_path / "0", seed=0), url)
    (_, pinned), (_, newest) = pin_version(f"{url}/linear@production"), pin_version(f"{url}/linear")
    assert pinned.bundle == f"{url}/linear@{pinned.version}" == pin_version(pinned.bundle)[1].bundle
    with pytest.raises(NotPublishedError):
        pin_version(f"{url}/linear@staging")
    promote(project, write_bundle(tmp_path / "1", seed=1), url)
    _, latest = pin_version(f"{url}/linear@production")
    assert latest.version != pinned.version
    monkeypatch.setenv("ORTPREP_REGISTRY", str(tmp_path / "registry"))
    assert pin_version("registry://linear@production")[1] == latest
    for watch_s, expected in ((0.0, pinned), (1.0, latest)):
        assert follow_aliases({"linear": pinned}, ServeConfig(watch_s=watch_s)) == {"linear": expected}
    gone = dataclasses.replace(pinned, alias=f"{url}/linear@staging")
    assert follow_aliases({"linear": gone}, ServeConfig()) == {"linear": gone}
    assert (newest.alias, follow_aliases({"net": newest}, ServeConfig())) == ("", {"net": newest})
    _, folder = pin_version(str(tmp_path / "0"))
    require_version(folder, tmp_path / "0")
    with pytest.raises(IntegrityError, match="another build"):
        require_version(folder, write_bundle(tmp_path / "0", seed=2))


# -- replicas and nodes are killed, and versions replaced, while requests are in flight


@pytest.mark.slow
def test_no_request_that_is_repeated_is_lost_and_an_update_loses_nothing(nodes, bundle, tmp_path):
    """Half of the requests come by HTTP, half by a handle; a replica and a node are killed."""
    options = StormOptions(
        requests=300, nodes=2, kill_replica_every=100, kill_node_every=200, http_port=HTTP_PORT
    )
    negation = write_model_bundle(
        tmp_path / "negation",
        {"y": ("Neg", ("x",))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("a", "b"))},
        {"input:x": ONE, "output:y": -ONE},
    )
    try:
        check_report(run_storm(nodes, negation, bundle, options), options)
    finally:
        serve.delete("storm")


def check_report(report, options):
    for part in ("faults", "update"):
        assert report[part]["lost"] == []
        assert report[part]["wrong"] == 0
        assert report[part]["answered"].keys() == {"http", "handle"}
    assert sum(report["faults"]["answered"].values()) == options.requests
    assert report["faults"]["replicas_killed"] >= 1
    assert report["faults"]["nodes_killed"] >= 1
    assert report["update"]["new_version_answers"]


# -- a node that serves needs Ray and what a runtime job needs, and nothing of the build

BUILD = {"onnx", "doit", "typer", "ortprep.stages", "ortprep.build", "ortprep.tuning"}
PACKAGE = "ortprep.ray_inference"


@pytest.mark.parametrize(
    ("statement", "left_out"),
    [
        (f"import {PACKAGE}.config", {"ray", *BUILD}),
        (f"import {PACKAGE}.deployment, {PACKAGE}.pinning", BUILD),
    ],
)
def test_a_node_needs_ray_and_what_a_job_needs_and_nothing_of_the_build(statement, left_out):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert not left_out & set(done.stdout.split())


# -- a bundle goes by way of a registry to every node, once each, and answers there as it does here


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))


def pulled_weights(nodes):
    weights = "registry/*/cpu/linear_optimized.onnx.data"
    return {str(path) for node in nodes.nodes for path in node.cache.glob(weights)}


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_each_node_pulls_a_bundle_once_and_its_replicas_map_it_and_answer_as_here(nodes, tmp_path):
    unpacked = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
    folder, url = write_bundle(tmp_path / "linear", options=unpacked), (tmp_path / "registry").as_uri()
    with open_catalogue(url) as catalogue:
        publish(folder, catalogue)
    (expected,) = load(folder).run(["y"], {"x": sample()})
    before = pulled_weights(nodes)
    with deployed(f"{url}/linear", config=ServeConfig(cpus=0.5), replicas=4) as handle:
        there = pulled_weights(nodes) - before
        assert 1 <= len(there) <= len(nodes.nodes)
        wait_for(lambda: len(nodes.replicas()) == 4, what="four replicas run")
        for pid in nodes.replicas():
            mapped = re.findall(r"\S+/linear_optimized\.onnx\.data", Path(f"/proc/{pid}/maps").read_text())
            assert len(set(mapped)) == 1
            assert set(mapped) <= there
        for _ in range(8):
            answer = handle.run.remote({"x": sample()}).result(timeout_s=300)
            assert answer["y"].tobytes() == expected.tobytes()
    # The driver has read what the references name, and no weights.
    assert not list(tmp_path.glob("driver/registry/*"))
