"""MLflow as a registry, against a real server, and through a proxy that does to it what networks do."""

import dataclasses
import logging
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.errors import AccessDeniedError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.registry.backend import Kind, ref_name
from ortprep.registry.backends.mlflow import MlflowBackend
from ortprep.registry.backends.mlflow_server import MlflowServer as TrackingServer
from ortprep.registry.backends.mlflow_server import ProxiedArtifacts
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from tests.registry import builders
from tests.registry.builders import (
    make_version,
    missing,
    name_of,
    put_part,
    read_file,
    read_part,
    write_files,
)
from tests.registry.fault_proxy import Fault, fault_proxy

pytestmark = [
    pytest.mark.slow,
    # Its import takes longer than that of all other tests, whether these are run or not.
    pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow"),
]

MANIFEST = Path(__file__).parents[1] / "compat" / "0.1.0" / "conv" / "manifest.json"
BIG = bytes(range(256)) * 4096 * 3 + b"end"


@pytest.fixture(scope="module")
def server(mlflow):
    return mlflow


@pytest.fixture(scope="module")
def running_proxy(server):
    with fault_proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy):
    running_proxy.clear()
    return running_proxy


@pytest.fixture
def backend(server):
    return MlflowBackend(f"mlflow+{server.url}")


@pytest.fixture
def behind(proxy):
    return MlflowBackend(f"mlflow+{proxy.url}")


@pytest.fixture
def model():
    return f"m-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(server):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server.url, registry_uri=server.url)


def make_part(model, folder, contents, *, created_at="2026-01-02T03:04:05Z"):
    write_files(folder, contents)
    return builders.make_part(model, contents, created_at=created_at)


def publish(backend, model, folder, label="one", *, created_at="2026-01-01T00:00:00Z"):
    contents = {"manifest.json": MANIFEST.read_bytes(), "t": created_at.encode()}
    part = make_part(model, folder, contents, created_at=created_at)
    put_part(backend, part, folder)
    version = make_version(part, label)
    backend.put_ref(model, Kind.VERSION, name_of(version), version.data)
    return version


# Files


def test_a_cut_upload_leaves_no_file(behind, proxy, model, tmp_path):
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    proxy.faults.append(Fault("cut_request", method="PUT", at_bytes=2_000_000, times=99))
    with pytest.raises(RegistryUnavailableError):
        put_part(behind, part, tmp_path)
    proxy.clear()
    assert missing(behind, part) == part.files
    put_part(behind, part, tmp_path)
    assert read_file(behind, part, "m.onnx") == BIG


@pytest.mark.parametrize("path", ["a#b.bin", "a%2Fb.bin"])
def test_a_name_that_mlflow_refuses_is_an_error(backend, model, tmp_path, path):
    part = make_part(model, tmp_path, {path: b"odd"})
    with pytest.raises(RegistryError, match="cannot store a file of this name"):
        put_part(backend, part, tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize(
    "location",
    [
        "file:///tmp/elsewhere",
        "/tmp/elsewhere",
        "http://host/artifacts",
        "https://evil/artifacts",
        "https://host:444/artifacts",
        "mlflow-artifacts://evil/x",
        "ftp://host/x",
        "dbfs:/x",
        "s3://bucket/x",
        "s3://bucket/x::file:///etc",
        "simplecache::s3://bucket/x",
    ],
)
def test_artifacts_elsewhere_are_refused(location):
    """Whoever made the experiment wrote its location: the token would go there, or a local file be read."""
    server = TrackingServer("mlflow+https://host")
    with pytest.raises(AccessDeniedError, match="artifacts are stored elsewhere"):
        ProxiedArtifacts(location, server)
    for climbing in ("mlflow-artifacts:/1/../2", "https://host/api/%2e%2e/2", "s3://bucket/a/../b"):
        with pytest.raises(AccessDeniedError, match="a bad address"):
            ProxiedArtifacts(climbing, server)
    for fine in ("mlflow-artifacts:/1/x/artifacts", "mlflow-artifacts://host/1", "https://host/api/1"):
        ProxiedArtifacts(fine, server)


@pytest.mark.attack
def test_a_version_of_thousands_of_digits_is_none_of_ours(monkeypatch):
    digest = digest_bytes(b"{}")
    tags = [
        {"key": f"ortprep.versions.{ref_name(digest)}", "value": "{}"},
        {"key": "ortprep.version", "value": digest},
    ]
    listed = [{"version": "9" * 15, "tags": tags}]
    monkeypatch.setattr(TrackingServer, "list_all", lambda *_, **__: listed)
    backend = MlflowBackend("mlflow+https://host")
    assert len(backend.list_refs("net", Kind.VERSION)) == 1
    listed[0]["version"] = "9" * 5000
    assert backend.list_refs("net", Kind.VERSION) == {}


@pytest.mark.attack
def test_a_server_that_sends_elsewhere_is_not_followed(behind, proxy, server, model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    part = make_part(model, tmp_path, {"m.onnx": b"small"})
    put_part(behind, part, tmp_path)
    with fault_proxy(server.url) as elsewhere:
        headers = {"Location": f"{elsewhere.url}/stolen"}
        proxy.faults.append(Fault("status", method="GET", path="m.onnx", status=307, headers=headers))
        with pytest.raises(RegistryError):
            read_file(behind, part, "m.onnx")
        assert elsewhere.requests == []


# Faults


@pytest.mark.parametrize(
    ("path", "kind"), [("/api/2.0/mlflow-artifacts/", NotPublishedError), ("/api/2.0/mlflow/", RegistryError)]
)
def test_a_server_that_lacks_the_api_says_nothing_of_what_is_published(
    behind, proxy, model, tmp_path, path, kind
):
    part = make_part(model, tmp_path, {"m.onnx": b"small"})
    put_part(behind, part, tmp_path)
    proxy.faults.append(Fault("status", path=path, status=404, times=99))
    with pytest.raises(kind) as caught:
        missing(behind, part)
    assert type(caught.value) is kind


def test_a_store_that_says_500_of_what_is_missing_is_understood(behind, proxy, model, tmp_path):
    part = make_part(model, tmp_path, {"m.onnx": b"small"})
    put_part(behind, part, tmp_path)
    other = builders.make_part(model, {"n.onnx": b"small"})
    gone = dataclasses.replace(part, files=other.files)
    proxy.faults.append(Fault("status", method="GET", path=r"[mn]\.onnx", status=500, times=99))
    with pytest.raises(NotPublishedError):
        read_file(behind, gone, "n.onnx")
    with pytest.raises(RegistryUnavailableError):
        read_file(behind, part, "m.onnx")


def test_a_listing_that_is_none_is_no_empty_one(behind, proxy, model, tmp_path):
    part = make_part(model, tmp_path, {"m.onnx": b"small"})
    put_part(behind, part, tmp_path)
    for body in (b"<html>", b'{"files": [{}]}', b'{"files": 1}', b"[]"):
        proxy.faults = [Fault("replace", path=r"artifacts\?path", body=body, times=99)]
        with pytest.raises(RegistryError, match="list of files"):
            missing(behind, part)


@pytest.mark.attack
def test_credentials_are_sent_and_never_shown(behind, proxy, model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    caplog.set_level(logging.DEBUG)
    part = make_part(model, tmp_path, {"m.onnx": b"small"})
    put_part(behind, part, tmp_path)
    assert all(headers.get("Authorization", "").startswith("Basic ") for headers in proxy.headers)
    shown = []
    for status in (401, 500):
        proxy.faults = [Fault("status", status=status, times=99)]
        with pytest.raises(RegistryError) as caught:
            behind.list_refs(model, Kind.VERSION)
        shown.append(str(caught.value))
    text = caplog.text + "".join(shown)
    sent = {headers.get("Authorization", "Basic -")[6:] for headers in proxy.headers}
    assert "hunter2" not in text
    assert all(secret not in text for secret in sent)


# What MLflow's users see


def test_versions_labels_and_aliases_are_the_registered_models_own(backend, client, model, tmp_path):
    old = publish(backend, model, tmp_path, "2026.1")
    new = publish(backend, model, tmp_path, "2026.2", created_at="2026-02-01T00:00:00Z")
    backend.put_ref(model, Kind.ALIAS, "production", old.data)
    shown = client.get_model_version_by_alias(model, "production")
    assert shown.tags["ortprep.version"] == old.digest
    assert shown.tags["ortprep.label"] == "2026.1"
    run = client.get_run(shown.run_id)
    assert run.data.tags["ortprep.part"] == old.parts[0].digest
    assert shown.source == f"{run.info.artifact_uri}/bundle"
    number = next(
        one.version
        for one in client.search_model_versions(f"name='{model}'")
        if one.tags["ortprep.version"] == new.digest
    )
    client.set_registered_model_alias(model, "production", number)
    assert backend.list_refs(model, Kind.ALIAS) == {"production": new.digest}


@pytest.mark.attack
def test_a_version_that_somebody_adds_to_the_number_of_another_deletes_neither(
    backend, client, model, tmp_path
):
    live = publish(backend, model, tmp_path, "2026.1")
    backend.put_ref(model, Kind.ALIAS, "production", live.data)
    forged = make_version(make_part(model, tmp_path, {"m.onnx": b"forged"}), "2026.2")
    number = client.get_model_version_by_alias(model, "production").version
    tag = f"ortprep.versions.{ref_name(forged.digest, forged.label)}"
    client.set_model_version_tag(model, number, tag, forged.data.decode())
    catalogue = Catalogue(backend)
    everything = RetentionPolicy(keep_latest=0, keep_days=0, grace_hours=0)
    with pytest.raises(RegistryError, match="tags of a version in MLflow were changed"):
        collect(model, catalogue, policy=everything, dry_run=False)
    client.set_model_version_tag(model, number, "ortprep.version", forged.digest)
    with pytest.raises(RegistryError, match="tags of a version in MLflow were changed"):
        collect(model, catalogue, policy=everything, dry_run=False)
    client.set_model_version_tag(model, number, "ortprep.version", live.digest)
    client.delete_model_version_tag(model, number, tag)
    assert read_part(backend, live.parts[0].digest, model)
    assert backend.list_refs(model, Kind.ALIAS) == {"production": live.digest}


def test_mlflows_own_download_of_an_alias_is_the_bundle(backend, server, model, tmp_path, monkeypatch):
    import mlflow

    version = publish(backend, model, tmp_path / "a")
    backend.put_ref(model, Kind.ALIAS, "production", version.data)
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", server.url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", server.url)
    found = Path(
        mlflow.artifacts.download_artifacts(f"models:/{model}@production", dst_path=str(tmp_path / "out"))
    )
    assert (found / "manifest.json").read_bytes() == MANIFEST.read_bytes()
    assert (found / "t").read_bytes() == b"2026-01-01T00:00:00Z"
