"""Registries for tests: each kind is the real thing, started once for this folder, and ended after it."""

import itertools

import pytest

from ortprep.registry.catalogue import open_catalogue
from ortprep.transport import transfer
from tests.registry.servers import BUCKET, mlflow_server, oci_server, s3_server

SLOW_KINDS = tuple(pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "mlflow"))
KINDS = ("directory", "oci", *SLOW_KINDS)
"""A contract is quick on two kinds of registry, and slow on all."""

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees what another one cached."""
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ORTPREP_REGISTRY", raising=False)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What is unavailable is asked again at once."""
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="package")
def oci(tmp_path_factory):
    with oci_server(tmp_path_factory.mktemp("oci")) as server:
        yield server


@pytest.fixture(scope="package")
def oci_url(oci):
    return oci.url


@pytest.fixture(scope="package")
def mlflow(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture(scope="package")
def mlflow_url(mlflow):
    return mlflow.url


@pytest.fixture(scope="package")
def s3_url(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=KINDS)
def kind(request):
    return str(request.param)


@pytest.fixture
def registry(kind, request, tmp_path, monkeypatch):
    """URL of a registry of each kind, without models."""
    return make_registry(kind, request, tmp_path, monkeypatch)


def make_registry(kind, request, tmp_path, monkeypatch):
    if kind == "directory":
        return str(tmp_path / "registry")
    server = request.getfixturevalue(f"{kind}_url")
    if kind == "oci":
        return f"oci+http://{server.partition('://')[2]}/team{next(_numbers)}"
    if kind == "mlflow":
        return f"mlflow+{server}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return f"s3://{BUCKET}/registry{next(_numbers)}"


@pytest.fixture
def model(kind):
    """A name that no other test uses: an MLflow server keeps the models of all of them."""
    return f"net{next(_numbers)}"


@pytest.fixture
def catalogue(registry):
    with open_catalogue(registry) as opened:
        yield opened
