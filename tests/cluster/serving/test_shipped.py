"""A shipped model goes by way of a registry to every node, once each, and answers there as it does here."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.cluster import OnnxPredictor, ServeConfig, pin_bundle
from ortprep.errors import NotPublishedError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.runtime import load
from tests.cluster.builders import SmallCluster
from tests.cluster.serving.builders import deployed
from tests.cluster.test_data import BIAS, rows, write_net
from tests.fakes import wait_for
from tests.runtime.builders import write_bundle, write_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"
    ),
]


@pytest.fixture(scope="module")
def registry(squeezenet):
    """The registry's URL; it has a version of the model that is called `production`."""
    url = (squeezenet.root / "registry").as_uri()
    published = squeezenet.run("publish", "squeezenet", "--registry", url)
    assert published.code == 0, published.err
    promoted = squeezenet.run("promote", "squeezenet", "production", "--registry", url)
    assert promoted.code == 0, promoted.err
    return url


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))


def images(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(count).random((count, 3, 224, 224), np.float32)


def pulled_weights(nodes: SmallCluster) -> set[str]:
    weights = "registry/bundles/*/cpu/linear_optimized.onnx.data"
    return {str(path) for node in nodes.nodes for path in node.cache.glob(weights)}


def test_each_node_pulls_a_bundle_once_and_its_replicas_map_it_and_answer_as_here(
    nodes, registry, squeezenet, tmp_path
):
    unpacked = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
    folder, url = write_bundle(tmp_path / "linear", options=unpacked), (tmp_path / "registry").as_uri()
    published = squeezenet.run("publish", str(folder), "--registry", url)
    assert published.code == 0, published.err
    session = load(squeezenet.bundle("squeezenet"))
    name = session.get_outputs()[0].name
    bundles = (f"{url}/linear", f"{registry}/squeezenet@production")
    before = pulled_weights(nodes)
    with deployed(*bundles, config=ServeConfig(cpus=0.5), replicas=4) as handle:
        there = pulled_weights(nodes) - before
        assert 1 <= len(there) <= len(nodes.nodes)
        wait_for(lambda: len(nodes.replicas()) == 4, what="four replicas run")
        for pid in nodes.replicas():
            mapped = re.findall(r"\S+/linear_optimized\.onnx\.data", Path(f"/proc/{pid}/maps").read_text())
            assert len(set(mapped)) == 1
            assert set(mapped) <= there
        for image in images(8):
            answer = handle.run.remote({"data_0": image[None]}, "squeezenet").result(timeout_s=300)
            (expected,) = session.run([name], {"data_0": image[None]})
            assert answer[name].tobytes() == expected.tobytes()
    # The driver has read what the references name, and no weights.
    assert list(tmp_path.glob("driver/registry/documents/*"))
    assert not list(tmp_path.glob("driver/registry/bundles/*"))


def test_an_alias_is_pinned_to_the_version_that_it_names(registry):
    pinned = pin_bundle(f"{registry}/squeezenet@production")
    assert pinned.startswith(f"{registry}/squeezenet@sha256:")
    assert pin_bundle(pinned) == pinned
    with pytest.raises(NotPublishedError):
        pin_bundle(f"{registry}/squeezenet@staging")


def test_a_folder_registry_is_named_in_full(registry, monkeypatch):
    monkeypatch.setenv("ORTPREP_REGISTRY", registry.removeprefix("file://"))
    assert pin_bundle("registry://squeezenet@production") == pin_bundle(f"{registry}/squeezenet@production")


def test_in_a_task_the_environment_is_left_alone_and_in_an_actor_gpus_are_hidden(nodes, tmp_path):
    import ray

    net = write_net(tmp_path / "net")

    def open_here(*_: object) -> tuple[str, int]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"
        predict = OnnxPredictor(net, constants=BIAS)
        options = predict._model.session.get_session_options()
        return os.environ["CUDA_VISIBLE_DEVICES"], options.intra_op_num_threads

    remote: Any = ray.remote(num_cpus=1, max_retries=0)
    assert ray.get(remote(open_here).remote(), timeout=600) == ("7", 1)
    actor = ray.remote(num_cpus=1)(type("Opener", (), {"open": open_here})).remote()
    assert ray.get(actor.open.remote(), timeout=600) == ("", 1)
    ray.kill(actor)


def test_a_dataset_is_answered_row_by_row_on_all_nodes(nodes, tmp_path):
    import ray.data

    folder, url = write_net(tmp_path / "net", 4), (tmp_path / "registry").as_uri()
    write_loader_config(folder, dataclasses.replace(read_loader_config(folder), name="linear"))
    write_record(folder)  # the manifest that a registry wants; its model is called so
    with open_catalogue(url) as catalogue:
        publish(folder, catalogue)
    ray.data.DataContext.get_current().enable_progress_bars = False
    given = rows(1000)
    # Blocks that are there already: beside the actors there is no processor for tasks that would make some.
    dataset = ray.data.from_numpy(np.split(given["x"], [100, 330, 331, 800]))
    answers = dataset.map_batches(
        OnnxPredictor,
        fn_constructor_kwargs={
            "bundle": pin_bundle(f"{url}/linear"),
            "columns": {"x": "data"},
            "constants": BIAS,
            "outputs": ["y"],
            "keep": True,
        },
        batch_size=50,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    ).take_all()
    assert len(answers) == 1000
    by_image = {row["data"].tobytes(): row["y"] for row in answers}
    session = load(folder)
    for at in range(0, 1000, 4):
        batch = given["x"][at : at + 4]
        (y,) = session.run(["y"], {"x": batch, **BIAS})
        for row, expected in zip(batch, y, strict=True):
            assert by_image[row.tobytes()].tobytes() == expected.tobytes()
