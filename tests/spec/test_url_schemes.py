"""Schemes of URLs: plain files and objects are taken, and nothing that wraps, chains or runs."""

import json

import fsspec
import pytest
from pydantic import ValidationError

from ortprep.cluster.building.work_store import WorkStore
from ortprep.errors import RegistryError
from ortprep.registry.references import open_registry
from ortprep.spec.models import SourceSpec
from ortprep.spec.urls import SCHEMES, check_url
from tests.fakes import serve


@pytest.fixture
def reference(tmp_path):
    """The URL of a file that another file makes up; before fsspec 2026.6 that one's `gen` ran code."""
    template = {"key": "{{ 'made' + '.onnx' }}", "url": "x", "dimensions": {"i": [0]}}
    index = {"version": 1, "gen": [template], "refs": {"model.onnx": "base64:QUJD"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    url = f"reference://model.onnx::file://{tmp_path}/index.json"
    with fsspec.open(url) as file:
        assert file.read() == b"ABC", "fsspec has to take it, or this proves nothing"
    return url


@pytest.mark.attack
def test_a_chained_url_reaches_no_filesystem(reference):
    with pytest.raises(ValidationError, match=r"s3://"):
        SourceSpec.model_validate({"url": reference})
    with pytest.raises(RegistryError, match=r"not a registry: reference://.*\n.*s3://"):
        open_registry(reference)
    with pytest.raises(RegistryError, match=r"not a work store: reference://.*\n.*s3://"):
        WorkStore(reference, "net")


@pytest.mark.attack
def test_a_web_server_is_no_registry_and_no_work_store():
    """fsspec would unpack its answers, and follow its listings for ever."""
    with serve() as server:
        for url in (server.url, server.url.replace("http", "HTTP"), "https://127.0.0.1:9/"):
            with pytest.raises(RegistryError, match=r"not a registry(.|\n)*web server") as raised:
                open_registry(url).list_models()
            assert "https://" not in str(raised.value).partition("\n")[2]
            with pytest.raises(RegistryError, match=r"not a work store(.|\n)*web server"):
                WorkStore(url, "net").check_writable()
        assert server.requests == []


@pytest.mark.attack
@pytest.mark.parametrize(
    "url",
    [
        "reference://m.onnx",
        "filecache://host/m.onnx",
        "simplecache::https://host/m.onnx",
        "zip://m.onnx::https://host/x.zip",
        "s3://bucket/x::file:///etc/passwd",
        "https://host/x::reference://m",
        "file::reference://m",
        "ssh://host/m.onnx",
        "sftp://host/m.onnx",
        "github://org:repo@main/m.onnx",
        "data://text/plain,x",
        "local:///m.onnx",
        "file:///models/m.onnx",
        "reference::file:///index.json",
        "/models/m.onnx",
        "",
    ],
)
def test_a_scheme_that_is_not_listed_is_refused_with_those_that_are(url):
    with pytest.raises(ValueError, match="expected a URL that begins with one of") as raised:
        check_url(url)
    assert all(f"{scheme}://" in str(raised.value) for scheme in SCHEMES)


@pytest.mark.parametrize(
    "url",
    [
        "https://host/m.onnx?sig=1",
        "HTTP://[::1]:8080/m.onnx",
        "s3://bucket/m.onnx",
        "gs://bucket/m.onnx",
        "az://container/m.onnx",
        "abfss://container@account.dfs.core.windows.net/m.onnx",
        "hf://org/repo/m.onnx@main",
    ],
)
def test_plain_files_and_objects_are_allowed(url):
    check_url(url)


def test_a_folder_may_be_called_as_it_likes(tmp_path):
    store = WorkStore(f"{tmp_path}/reference::file:/x", "net")
    store.check_writable()
    assert (tmp_path / "reference::file:/x/net/files").is_dir()
