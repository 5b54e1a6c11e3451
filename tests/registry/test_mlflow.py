"""MLflow as a registry, against a real server, and through a proxy that does to it what networks do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="needs mlflow")

from pipeline.bundle.digest import PREFIX, digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import (
    AccessDeniedError,
    IntegrityError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from pipeline.registry.backends.mlflow.backend import MlflowBackend
from pipeline.registry.records import (
    AliasRecord,
    ClaimRecord,
    LabelRecord,
    PartRecord,
    PartVariant,
    Record,
    RecordName,
    VersionRecord,
    encode_record,
    file_records,
    record_digest,
)
from pipeline.registry.state import fold
from tests.registry.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.registry.mlflow_server import MlflowServer, mlflow_server

MANIFEST = Path(__file__).parents[1] / "compat" / "0.1.0" / "conv" / "manifest.json"
SOURCE, SPEC = PREFIX + "1" * 64, PREFIX + "2" * 64
BIG = bytes(range(256)) * 4096 * 3 + b"end"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture(scope="session")
def running_proxy(server: MlflowServer) -> Iterator[FaultProxy]:
    with fault_proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    # As its users tell MLflow's client not to go on asking for minutes.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    running_proxy.clear()
    return running_proxy


@pytest.fixture
def backend(server: MlflowServer) -> MlflowBackend:
    return MlflowBackend(f"mlflow+{server.url}")


@pytest.fixture
def behind(proxy: FaultProxy) -> MlflowBackend:
    return MlflowBackend(f"mlflow+{proxy.url}")


@pytest.fixture
def model() -> str:
    return f"m-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(server: MlflowServer) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server.url, registry_uri=server.url)


def make_part(
    model: str, folder: Path, contents: dict[str, bytes], *, created_at: str = "2026-01-02T03:04:05Z"
) -> PartRecord:
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    files = tuple(FileEntry(path, len(data), digest_bytes(data)) for path, data in contents.items())
    variant = PartVariant("cpu", "cpu", "1.31.1", ("CPUExecutionProvider",), "AMD EPYC")
    return PartRecord(model, SOURCE, SPEC, created_at, files, (variant,))


def upload(backend: MlflowBackend, part: PartRecord, folder: Path) -> list[int]:
    reports: list[int] = []
    for entry in backend.find_missing(part.model, part):
        backend.upload_file(part.model, part, entry, folder / entry.path, reports.append)
    backend.finish_part(part.model, part)
    return reports


def download(backend: MlflowBackend, part: PartRecord, path: str, offset: int = 0) -> bytes:
    entry = next(entry for entry in part.files if entry.path == path)
    with backend.open_file(part.model, part, entry, offset) as blocks:
        return b"".join(bytes(block) for block in blocks)


def write(backend: MlflowBackend, model: str, *records: Record) -> None:
    for record in records:
        backend.write_record(model, *encode_record(record))


def mirror(backend: MlflowBackend, model: str, *records: Record) -> None:
    state = fold(model, file_records(records))
    backend.mirror(model, state)


def claim(label: str = "a") -> tuple[RecordName, bytes]:
    return encode_record(ClaimRecord(label, SOURCE))


# Records


def test_a_record_that_was_written_is_listed_and_read(backend: MlflowBackend, model: str) -> None:
    assert backend.list_records(model) == ()
    name, data = claim()
    backend.write_record(model, name, data)
    assert backend.list_records(model) == (name,)
    assert backend.read_record(model, name) == data
    assert model in backend.list_models()


def test_writing_a_record_again_sends_nothing(behind: MlflowBackend, proxy: FaultProxy, model: str) -> None:
    behind.write_record(model, *claim())
    sent = proxy.count("PUT")
    behind.write_record(model, *claim())
    assert (sent, proxy.count("PUT")) == (1, 1)


def test_a_record_that_was_deleted_is_gone(backend: MlflowBackend, model: str) -> None:
    name, data = claim()
    backend.write_record(model, name, data)
    backend.delete_record(model, name)
    backend.delete_record(model, name)
    assert backend.list_records(model) == ()
    with pytest.raises(NotPublishedError, match="expected to find it"):
        backend.read_record(model, name)
    assert model not in backend.list_models()


def test_publishers_that_begin_at_once_see_all_records(server: MlflowServer, model: str) -> None:
    barrier, names = Barrier(4), []

    def publish(number: int) -> None:
        backend = MlflowBackend(f"mlflow+{server.url}")
        name, data = claim(f"label-{number}")
        names.append(name)
        barrier.wait()
        backend.write_record(model, name, data)

    threads = [Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    reader = MlflowBackend(f"mlflow+{server.url}")
    assert reader.list_records(model) == tuple(sorted(names))
    assert all(reader.read_record(model, name) for name in names)


def test_records_in_several_runs_are_one_set(backend: MlflowBackend, client: Any, model: str) -> None:
    backend.write_record(model, *claim("a"))
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    run = client.create_run(experiment, run_name="records", tags={"ortprep.kind": "records"})
    name, data = claim("b")
    client.log_text(run.info.run_id, data.decode(), f"records/{name}.json")
    assert set(backend.list_records(model)) == {claim("a")[0], name}
    assert backend.read_record(model, name) == data


def test_records_are_not_written_where_nobody_looks(backend: MlflowBackend, client: Any, model: str) -> None:
    backend.write_record(model, *claim("a"))
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    client.delete_run(client.search_runs([experiment])[0].info.run_id)
    backend.write_record(model, *claim("b"))
    assert backend.list_records(model) == (claim("b")[0],)


def test_what_is_no_record_is_not_listed(backend: MlflowBackend, client: Any, model: str) -> None:
    name, data = claim()
    backend.write_record(model, name, data)
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    run = client.search_runs([experiment], "tags.`ortprep.kind` = 'records'")[0].info.run_id
    client.log_text(run, "x", "records/notes.txt")
    client.log_text(run, "x", "records/sub/claim.json")
    client.log_text(run, "", f"records/{claim('cut')[0]}.json")
    assert backend.list_records(model) == (name,)


def test_a_cut_record_does_not_hide_the_whole_one(
    behind: MlflowBackend, proxy: FaultProxy, model: str
) -> None:
    behind.write_record(model, *claim("first"))
    name, data = claim()
    proxy.faults.append(Fault("cut_request", method="PUT", at_bytes=20))
    behind.write_record(model, name, data)
    assert behind.read_record(model, name) == data


def test_a_cut_record_on_the_server_is_written_again(
    backend: MlflowBackend, server: MlflowServer, model: str
) -> None:
    name, data = claim()
    backend.write_record(model, name, data)
    (stored,) = (server.folder / str(backend._tracking.find_experiment(model))).rglob(f"{name}.json")
    stored.write_bytes(data[:10])
    backend.write_record(model, name, data)
    assert backend.read_record(model, name) == data


# Files


def test_files_come_back_byte_for_byte(backend: MlflowBackend, model: str, tmp_path: Path) -> None:
    loader = b'{"graph_optimization_level": "ORT_DISABLE_ALL",\r\n "nan": "\\u0000"}\n'
    contents = {
        "loader.json": loader,
        "cpu/model.onnx": BIG,
        "empty.bin": b"",
        "cpu/ein ü & ein ?+;=.bin": b"odd",
        "copy.onnx": BIG,
    }
    part = make_part(model, tmp_path, contents)
    assert len(backend.find_missing(model, part)) == 4
    upload(backend, part, tmp_path)
    assert backend.find_missing(model, part) == ()
    assert {path: download(backend, part, path) for path in contents} == contents


@pytest.mark.parametrize("offset", [1, 1024 * 1024, len(BIG) - 1, len(BIG)])
def test_a_download_goes_on_anywhere(backend: MlflowBackend, model: str, tmp_path: Path, offset: int) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(backend, part, tmp_path)
    assert download(backend, part, "m.onnx", offset) == BIG[offset:]


def test_a_server_without_ranges_is_read_from_the_start(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(behind, part, tmp_path)
    proxy.faults.append(Fault("replace", method="GET", path="m.onnx", status=200, body=BIG))
    assert download(behind, part, "m.onnx", 100) == BIG[100:]


def test_progress_adds_up_whatever_had_to_go_again(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    proxy.faults.append(Fault("cut_request", method="PUT", at_bytes=2_000_000))
    reports = upload(behind, part, tmp_path)
    assert sum(reports) == len(BIG)
    assert download(behind, part, "m.onnx") == BIG


def test_a_cut_upload_leaves_no_file(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    proxy.faults.append(Fault("cut_request", method="PUT", at_bytes=2_000_000, times=99))
    with pytest.raises(RegistryUnavailableError):
        upload(behind, part, tmp_path)
    proxy.clear()
    assert behind.find_missing(model, part) == part.files
    upload(behind, part, tmp_path)
    assert download(behind, part, "m.onnx") == BIG


def test_a_short_file_on_the_server_counts_as_missing(
    backend: MlflowBackend, server: MlflowServer, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(backend, part, tmp_path)
    (stored,) = (server.folder / str(backend._tracking.find_experiment(model))).rglob("m.onnx")
    stored.write_bytes(BIG[:-1])
    assert backend.find_missing(model, part) == part.files


@pytest.mark.parametrize("other", [BIG[:-1] + b"X", BIG[:-1], BIG + b"X", b""])
def test_a_file_with_other_bytes_is_not_uploaded(
    backend: MlflowBackend, model: str, tmp_path: Path, other: bytes
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    (tmp_path / "m.onnx").write_bytes(other)
    with pytest.raises(IntegrityError, match=r"m\.onnx"):
        upload(backend, part, tmp_path)
    assert backend.find_missing(model, part) == part.files


def test_a_file_that_is_to_be_empty_is_checked(backend: MlflowBackend, model: str, tmp_path: Path) -> None:
    part = make_part(model, tmp_path, {"empty.bin": b""})
    (tmp_path / "empty.bin").write_bytes(b"no")
    with pytest.raises(IntegrityError, match=r"empty\.bin"):
        upload(backend, part, tmp_path)


def test_a_download_that_breaks_off_says_so_and_goes_on(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(behind, part, tmp_path)
    proxy.faults.append(Fault("cut_answer", method="GET", path="m.onnx", at_bytes=1_500_000))
    got: list[bytes] = []
    with pytest.raises(RegistryUnavailableError), behind.open_file(model, part, part.files[0], 0) as blocks:
        got.extend(bytes(block) for block in blocks)
    have = b"".join(got)
    assert 0 < len(have) < len(BIG)
    assert have + download(behind, part, "m.onnx", len(have)) == BIG


def test_no_more_is_read_than_a_file_has(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(behind, part, tmp_path)
    proxy.faults.append(Fault("endless", method="GET", path="m.onnx", at_bytes=10**9))
    assert hashlib.sha256(download(behind, part, "m.onnx")).digest() == hashlib.sha256(BIG).digest()
    assert proxy.sent_bytes < 10**8


def test_no_more_is_read_than_a_record_may_have(behind: MlflowBackend, proxy: FaultProxy, model: str) -> None:
    name, data = claim()
    behind.write_record(model, name, data)
    proxy.faults.append(Fault("endless", method="GET", path="records/claim", at_bytes=10**9))
    assert len(behind.read_record(model, name)) == 4 * 1024 * 1024 + 1


def test_other_bytes_come_through_unchecked(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(behind, part, tmp_path)
    proxy.faults.append(Fault("corrupt", method="GET", path="m.onnx", at_bytes=7))
    got = download(behind, part, "m.onnx")
    assert len(got) == len(BIG)
    assert got != BIG


def test_the_runs_of_a_deleted_part_are_gone_and_can_be_made_again(
    backend: MlflowBackend, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    upload(backend, part, tmp_path)
    backend.delete_part(model, record_digest(part))
    backend.delete_part(model, record_digest(part))
    with pytest.raises(NotPublishedError):
        download(backend, part, "m.onnx")
    upload(backend, part, tmp_path)
    assert download(backend, part, "m.onnx") == BIG


@pytest.mark.parametrize("path", ["a#b.bin", "a%2Fb.bin"])
def test_a_name_that_mlflow_refuses_is_an_error(
    backend: MlflowBackend, model: str, tmp_path: Path, path: str
) -> None:
    part = make_part(model, tmp_path, {path: b"odd"})
    with pytest.raises(RegistryError, match="no file of that name"):
        upload(backend, part, tmp_path)


def test_a_store_without_proxy_is_used_directly(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path
) -> None:
    client.create_experiment(f"ortprep/{model}", artifact_location=(tmp_path / "store").as_uri())
    contents = {"m.onnx": BIG, "empty.bin": b"", "cpu/copy.onnx": BIG}
    part = make_part(model, tmp_path, contents)
    reports = upload(backend, part, tmp_path)
    assert sum(reports) == len(BIG)
    assert backend.find_missing(model, part) == ()
    assert {path: download(backend, part, path) for path in contents} == contents
    assert download(backend, part, "m.onnx", 1000) == BIG[1000:]
    name, data = claim()
    with pytest.raises(NotPublishedError):
        backend.read_record(model, name)
    for _ in range(2):
        backend.write_record(model, name, data)
        assert backend.read_record(model, name) == data
    assert backend.list_records(model) == (name,)
    for _ in range(2):
        backend.delete_record(model, name)
    assert backend.list_records(model) == ()
    assert not any(path.is_symlink() for path in (tmp_path / "store").rglob("*"))
    (tmp_path / "m.onnx").write_bytes(b"others")
    with pytest.raises(IntegrityError):
        backend.upload_file(model, part, part.files[0], tmp_path / "m.onnx", reports.append)


# Faults


def test_a_server_that_is_down_is_unavailable() -> None:
    backend = MlflowBackend("mlflow+http://127.0.0.1:9")
    with pytest.raises(RegistryUnavailableError, match="cannot be reached"):
        backend.list_models()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, NotPublishedError),
        (429, RegistryUnavailableError),
        (500, RegistryUnavailableError),
        (503, RegistryUnavailableError),
        (400, RegistryError),
    ],
)
@pytest.mark.parametrize("path", ["/api/2.0/mlflow-artifacts/", "/api/2.0/mlflow/"])
def test_every_status_has_its_error(
    behind: MlflowBackend, proxy: FaultProxy, model: str, path: str, status: int, kind: type[RegistryError]
) -> None:
    behind.write_record(model, *claim())
    proxy.faults.append(Fault("status", path=path, status=status, times=99))
    if "artifacts" not in path and status == 404:
        kind = RegistryError  # a server that lacks the API says nothing of what is published
    with pytest.raises(kind) as caught:
        behind.list_records(model)
    assert type(caught.value) is kind


def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(
    behind: MlflowBackend, proxy: FaultProxy, model: str, tmp_path: Path
) -> None:
    part = make_part(model, tmp_path, {"m.onnx": BIG})
    for method in ("GET", "PUT"):
        proxy.faults.append(Fault("status", method=method, path="mlflow-artifacts", status=503))
    proxy.faults.append(Fault("status", path="/mlflow/", status=429))
    behind.write_record(model, *claim())
    upload(behind, part, tmp_path)
    proxy.faults.append(Fault("status", method="GET", path="m.onnx", status=503))
    assert download(behind, part, "m.onnx") == BIG
    assert all(fault.times == 0 for fault in proxy.faults)


def test_a_store_that_says_500_of_what_is_missing_is_understood(
    behind: MlflowBackend, proxy: FaultProxy, model: str
) -> None:
    behind.write_record(model, *claim("a"))
    proxy.faults.append(Fault("status", method="GET", path="records/claim", status=500, times=99))
    with pytest.raises(NotPublishedError):
        behind.read_record(model, claim("b")[0])
    with pytest.raises(RegistryUnavailableError):
        behind.read_record(model, claim("a")[0])


def test_a_listing_that_is_none_is_no_empty_one(behind: MlflowBackend, proxy: FaultProxy, model: str) -> None:
    behind.write_record(model, *claim())
    for body in (b"<html>", b'{"files": [{}]}', b'{"files": 1}', b"[]"):
        proxy.faults = [Fault("replace", path=r"artifacts\?path", body=body, times=99)]
        with pytest.raises(RegistryError, match="list of files"):
            behind.list_records(model)


def test_another_kind_of_server_is_told_apart(behind: MlflowBackend, proxy: FaultProxy) -> None:
    proxy.faults.append(Fault("replace", path="/api/", body=b"<html>login</html>", times=99))
    with pytest.raises(RegistryError, match="no MLflow server there"):
        behind.list_models()


def test_credentials_are_sent_and_never_shown(
    behind: MlflowBackend,
    proxy: FaultProxy,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    caplog.set_level(logging.DEBUG)
    behind.write_record(model, *claim())
    assert all(headers.get("Authorization", "").startswith("Basic ") for headers in proxy.headers)
    shown = []
    for status in (401, 500):
        proxy.faults = [Fault("status", status=status, times=99)]
        with pytest.raises(RegistryError) as caught:
            behind.list_records(model)
        shown.append(str(caught.value))
    text = caplog.text + "".join(shown)
    sent = {headers.get("Authorization", "Basic -")[6:] for headers in proxy.headers}
    assert "hunter2" not in text
    assert all(secret not in text for secret in sent)


@pytest.mark.parametrize(
    "url",
    ["mlflow+https://someone:hunter2@host", "mlflow+http://", "mlflow+", "mlflow+http://h?token=hunter2"],
)
def test_a_bad_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(RegistryError) as caught:
        MlflowBackend(url)
    assert "hunter2" not in str(caught.value)


def test_the_environment_names_the_server(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RegistryError, match="MLFLOW_TRACKING_URI"):
        MlflowBackend("mlflow://")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    assert MlflowBackend("mlflow://").list_records("nothing-there") == ()


# What MLflow's users see


@dataclasses.dataclass
class Published:
    """A model with one version, in the records' terms."""

    part: PartRecord
    version: VersionRecord

    @property
    def digest(self) -> str:
        return record_digest(self.version)


def publish(backend: MlflowBackend, model: str, folder: Path, *, created_at: str) -> Published:
    part = make_part(
        model,
        folder,
        {"manifest.json": MANIFEST.read_bytes(), "t": created_at.encode()},
        created_at=created_at,
    )
    upload(backend, part, folder)
    version = VersionRecord(model, SOURCE, SPEC, (record_digest(part),))
    write(backend, model, part, version)
    return Published(part, version)


def numbers_of(client: Any, model: str) -> dict[str, str]:
    found = client.search_model_versions(f"name='{model}'")
    return {version.tags["ortprep.version"]: str(version.version) for version in found}


def test_figures_are_metrics_of_the_parts_run(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path
) -> None:
    one = publish(backend, model, tmp_path, created_at="2026-01-01T00:00:00Z")
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`ortprep.part` = '{record_digest(one.part)}'")
    manifest = json.loads(MANIFEST.read_bytes())
    figures = manifest["variants"][0]["measurements"][0]["plans"][0]
    name = manifest["variants"][0]["name"]
    assert figures["plan"] == "default"
    assert "ready_ms" not in figures, "this manifest is of a version before"
    for figure in ("init_ms", "first_ms", "first_result_ms", "steady_ms", "private_mb"):
        assert run.data.metrics[f"{name}.default.{figure}"] == pytest.approx(figures[figure]["median"])
    assert run.data.params["targets"] == "cpu"
    assert run.data.tags["ortprep.source"] == SOURCE
    assert run.data.tags["ortprep.hardware"] == "AMD EPYC"
    assert run.info.status == "FINISHED"
    backend.finish_part(model, one.part)
    assert len(client.get_metric_history(run.info.run_id, f"{name}.default.init_ms")) == 1


def test_a_manifest_that_cannot_be_read_costs_only_the_metrics(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = make_part(model, tmp_path, {"manifest.json": b"{}"})
    upload(backend, part, tmp_path)
    assert "no metrics" in caplog.text
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    assert client.search_runs([experiment])[0].info.status == "FINISHED"


def test_versions_labels_and_aliases_are_shown(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path
) -> None:
    old = publish(backend, model, tmp_path, created_at="2026-01-01T00:00:00Z")
    new = publish(backend, model, tmp_path, created_at="2026-02-01T00:00:00Z")
    label = LabelRecord("2026.1", old.digest, "2026-01-01T00:00:01Z")
    alias = AliasRecord("production", "promote", old.digest, 1, "2026-01-01T00:00:02Z")
    records: list[Record] = [old.part, old.version, new.part, new.version, label, alias]
    mirror(backend, model, *records)
    numbers = numbers_of(client, model)
    assert sorted(numbers.values()) == ["1", "2"]
    shown = client.get_model_version_by_alias(model, "production")
    assert shown.tags["ortprep.version"] == old.digest
    assert shown.tags["ortprep.labels"] == "2026.1"
    assert shown.tags["ortprep.targets"] == "cpu"
    run = client.get_run(shown.run_id)
    assert run.data.tags["ortprep.part"] == record_digest(old.part)
    assert shown.source == f"{run.info.artifact_uri}/bundle"
    records += [
        AliasRecord("production", "promote", new.digest, 2, "2026-02-01T00:00:02Z"),
        LabelRecord("2026.2", new.digest, "2026-02-01T00:00:01Z"),
    ]
    mirror(backend, model, *records)
    assert numbers_of(client, model) == numbers
    moved = client.get_model_version_by_alias(model, "production")
    assert (moved.tags["ortprep.version"], moved.tags["ortprep.labels"]) == (new.digest, "2026.2")


def test_an_alias_moved_outside_is_reported_and_set_right(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = publish(backend, model, tmp_path, created_at="2026-01-01T00:00:00Z")
    new = publish(backend, model, tmp_path, created_at="2026-02-01T00:00:00Z")
    records: list[Record] = [old.part, old.version, new.part, new.version]
    records.append(AliasRecord("production", "promote", old.digest, 1, "2026-01-01T00:00:02Z"))
    mirror(backend, model, *records)
    records.append(AliasRecord("production", "promote", new.digest, 2, "2026-02-01T00:00:02Z"))
    mirror(backend, model, *records)
    assert "moved in MLflow" not in caplog.text
    client.set_registered_model_alias(model, "production", numbers_of(client, model)[old.digest])
    mirror(backend, model, *records)
    assert "moved in MLflow by somebody else" in caplog.text
    shown = client.get_model_version_by_alias(model, "production")
    assert shown.tags["ortprep.version"] == new.digest


@pytest.mark.parametrize("name", ["latest", "v1", "a.b"])
def test_an_alias_that_mlflow_refuses_is_left_out(
    backend: MlflowBackend,
    client: Any,
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    one = publish(backend, model, tmp_path, created_at="2026-01-01T00:00:00Z")
    aliases = [AliasRecord(alias, "promote", one.digest, 1, "") for alias in (name, "production")]
    mirror(backend, model, one.part, one.version, *aliases)
    assert client.get_registered_model(model).aliases == {"production": "1"}
    assert f"alias {name} of {model} is not shown" in caplog.text


def test_mirrors_at_once_leave_one_version_for_each_digest(
    server: MlflowServer, client: Any, model: str, tmp_path: Path
) -> None:
    backends = [MlflowBackend(f"mlflow+{server.url}") for _ in range(3)]
    one = publish(backends[0], model, tmp_path, created_at="2026-01-01T00:00:00Z")
    barrier = Barrier(3)
    failures: list[RegistryError] = []

    def show(backend: MlflowBackend) -> None:
        barrier.wait()
        try:
            mirror(backend, model, one.part, one.version)
        except RegistryError as error:
            failures.append(error)

    threads = [Thread(target=show, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    mirror(backends[0], model, one.part, one.version)
    assert len(client.search_model_versions(f"name='{model}'")) == 1


def test_a_collected_version_is_removed_and_others_stay(
    backend: MlflowBackend, client: Any, model: str, tmp_path: Path
) -> None:
    old = publish(backend, model, tmp_path, created_at="2026-01-01T00:00:00Z")
    new = publish(backend, model, tmp_path, created_at="2026-02-01T00:00:00Z")
    mirror(backend, model, old.part, old.version, new.part, new.version)
    foreign = client.create_model_version(model, "s3://bucket/somewhere", await_creation_for=0)
    # Whoever does not know of a version that has a record must leave it alone.
    mirror(backend, model, new.part, new.version)
    assert old.digest in {
        version.tags.get("ortprep.version") for version in client.search_model_versions(f"name='{model}'")
    }
    backend.delete_record(model, encode_record(old.version)[0])
    mirror(backend, model, new.part, new.version)
    left = client.search_model_versions(f"name='{model}'")
    assert {version.tags.get("ortprep.version") for version in left} == {new.digest, None}
    assert foreign.version in {version.version for version in left}


def test_a_model_without_versions_is_not_registered(backend: MlflowBackend, client: Any, model: str) -> None:
    mirror(backend, model)
    assert client.search_registered_models(f"name='{model}'") == []


def test_an_experiment_that_was_deleted_says_how_to_get_it_back(
    backend: MlflowBackend, client: Any, model: str
) -> None:
    backend.write_record(model, *claim())
    experiment = client.get_experiment_by_name(f"ortprep/{model}").experiment_id
    client.delete_experiment(experiment)
    with pytest.raises(RegistryError, match="was deleted") as caught:
        backend.list_records(model)
    assert "restore" in str(caught.value)
    client.restore_experiment(experiment)
    assert backend.list_records(model) == (claim()[0],)
