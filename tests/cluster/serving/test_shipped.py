"""A shipped model goes by way of a registry to every node, once each, and answers there as it does here."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.cluster import OnnxPredictor, ServeConfig, pin_bundle
from ortprep.errors import NotPublishedError
from ortprep.runtime import load
from tests.cluster.builders import SmallCluster
from tests.cluster.serving.builders import deployed
from tests.fakes import wait_for
from tests.prepare.builders import Project
from tests.runtime.builders import write_bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"
    ),
]


@pytest.fixture(scope="module")
def registry(squeezenet: Project) -> str:
    """The registry's URL; it has a version of the model that is called `production`."""
    url = (squeezenet.root / "registry").as_uri()
    published = squeezenet.run("publish", "squeezenet", "--registry", url)
    assert published.code == 0, published.err
    promoted = squeezenet.run("promote", "squeezenet", "production", "--registry", url)
    assert promoted.code == 0, promoted.err
    return url


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "driver"))


def images(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(count).random((count, 3, 224, 224), np.float32)


def pulled_weights(nodes: SmallCluster) -> set[str]:
    weights = "registry/bundles/*/cpu/linear_optimized.onnx.data"
    return {str(path) for node in nodes.nodes for path in node.cache.glob(weights)}


def test_each_node_pulls_a_bundle_once_and_its_replicas_map_it_from_the_cache(
    nodes: SmallCluster, squeezenet: Project, tmp_path: Path
) -> None:
    unpacked = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
    folder, url = write_bundle(tmp_path / "linear", options=unpacked), (tmp_path / "registry").as_uri()
    published = squeezenet.run("publish", str(folder), "--registry", url)
    assert published.code == 0, published.err
    before = pulled_weights(nodes)
    with deployed(f"{url}/linear", config=ServeConfig(cpus=0.5), replicas=4):
        there = pulled_weights(nodes) - before
        assert 1 <= len(there) <= len(nodes.nodes)
        wait_for(lambda: len(nodes.replicas()) == 4, what="four replicas run")
        for pid in nodes.replicas():
            mapped = re.findall(r"\S+\.onnx\.data", Path(f"/proc/{pid}/maps").read_text())
            assert len(set(mapped)) == 1
            assert set(mapped) <= there
    # The driver has read what the reference names, and no weights.
    assert list(tmp_path.glob("driver/registry/documents/*"))
    assert not list(tmp_path.glob("driver/registry/bundles/*"))


def test_a_shipped_model_answers_on_every_node_as_it_does_here(
    nodes: SmallCluster, registry: str, squeezenet: Project
) -> None:
    session = load(squeezenet.bundle("squeezenet"))
    name = session.get_outputs()[0].name
    bundle = f"{registry}/squeezenet@production"
    with deployed(bundle, config=ServeConfig(), replicas=2) as handle:
        for image in images(8):
            answer = handle.run.remote({"data_0": image[None]}).result(timeout_s=300)
            (expected,) = session.run([name], {"data_0": image[None]})
            assert answer[name].tobytes() == expected.tobytes()


def test_an_alias_is_pinned_to_the_version_that_it_names(registry: str) -> None:
    pinned = pin_bundle(f"{registry}/squeezenet@production")
    assert pinned.startswith(f"{registry}/squeezenet@sha256:")
    assert pin_bundle(pinned) == pinned
    with pytest.raises(NotPublishedError):
        pin_bundle(f"{registry}/squeezenet@staging")


def test_a_folder_registry_is_named_in_full(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTPREP_REGISTRY", registry.removeprefix("file://"))
    assert pin_bundle("registry://squeezenet@production") == pin_bundle(f"{registry}/squeezenet@production")


def test_a_dataset_of_images_is_classified_as_by_hand(
    nodes: SmallCluster, registry: str, squeezenet: Project
) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    given = images(40)
    answers = (
        ray.data.from_numpy(given)
        .map_batches(
            OnnxPredictor,
            fn_constructor_kwargs={
                "bundle": pin_bundle(f"{registry}/squeezenet@production"),
                "columns": {"data_0": "data"},
                "keep": True,
            },
            batch_size=16,
            concurrency=1,
            num_cpus=1,
        )
        .take_all()
    )
    session = load(squeezenet.bundle("squeezenet"))
    name = session.get_outputs()[0].name
    by_image = {row["data"].tobytes(): row[name] for row in answers}
    assert len(by_image) == 40
    for image in given:
        (expected,) = session.run([name], {"data_0": image[None]})
        assert by_image[image.tobytes()].tobytes() == expected[0].tobytes()
