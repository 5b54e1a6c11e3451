"""Clients that are not ours are served by HTTP, and their mistakes are answered with what is expected."""

import http.client
import json

import numpy as np
import pytest
import tritonclient.http
from ray import serve
from tritonclient.utils import InferenceServerException

from ortprep.ray_inference.config import ServeConfig
from ortprep.ray_inference.deployment import build_application
from ortprep.ray_inference.pinning import pin_version
from tests.ray_inference.builders import write_slow
from tests.ray_inference.conftest import HTTP_PORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::FutureWarning:ray", "ignore::DeprecationWarning"
    ),
]

MAX_JSON_BYTES = 2**22


@pytest.fixture(scope="module")
def service(served, bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = [bundle, write_slow(folder / "slow")]
    config = ServeConfig(
        max_ongoing_requests=2, max_queued_requests=4, max_body_bytes=2**26, max_json_bytes=MAX_JSON_BYTES
    )
    bundles = dict(pin_version(str(path)) for path in paths)
    app = build_application(config, bundles, on_gpu=False)
    serve.run(app, name="service", route_prefix="/")
    yield
    serve.delete("service")


@pytest.fixture
def client(service):
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{HTTP_PORT}", concurrency=4) as made:
        yield made


def tensor(name, array, **options):
    made = tritonclient.http.InferInput(name, array.shape, tritonclient.utils.np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, **options)
    return made


def ask(method, path, body=b"", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=600)
    try:
        connection.request(
            method, path, body, {key.replace("_", "-"): value for key, value in headers.items()}
        )
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, dict(response.headers), json.loads(text) if is_json else text
    finally:
        connection.close()


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_the_server_and_its_models_are_described(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("doubling")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    said = client.get_model_metadata("doubling")
    assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert said["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}]
    (version,) = said["versions"]
    assert client.is_model_ready("doubling", version)
    assert not client.is_model_ready("doubling", "1")


@pytest.mark.parametrize(("binary_in", "binary_out"), [(True, False), (False, True)])
def test_tensors_travel_as_bytes_or_as_json(client, *, binary_in, binary_out):
    inputs = [tensor("x", X, binary_data=binary_in)]
    outputs = [tritonclient.http.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer("doubling", inputs, outputs=outputs, request_id="mine")
    assert (result.as_numpy("y") == 2 * X).all()
    assert result.get_response()["id"] == "mine"


INFER = "/v2/models/doubling/infer"
ONE_ROW = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()


@pytest.mark.attack
@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/v2/nothing", b"", {}, 404),
        ("GET", "/v2/models/nobody", b"", {}, 404),
        ("GET", INFER, b"", {}, 405),
        ("POST", "/v2/health/ready", b"", {}, 405),
        ("POST", INFER, ONE_ROW, {}, 400),
        ("POST", INFER, ONE_ROW, {"Content_Encoding": "gzip"}, 415),
        ("POST", INFER, ONE_ROW, {"Inference_Header_Content_Length": "-1"}, 400),
        ("POST", INFER, ONE_ROW, {"Inference_Header_Content_Length": "9" * 30}, 400),
        ("POST", INFER, b" " * (MAX_JSON_BYTES + 1), {}, 413),
    ],
)
def test_http_refuses_with_a_status_and_no_trace_of_the_inside(service, method, path, body, headers, status):
    got, _, said = ask(method, path, body, **headers)
    assert got == status
    assert set(said) == {"error"}
    assert not any(word in said["error"] for word in ("Traceback", "/work", ".py", "site-packages"))


@pytest.mark.attack
def test_a_chunked_body_is_bounded_too(service):
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=600)
    parts = (b" " * 65536 for _ in range(2 * MAX_JSON_BYTES // 65536))
    connection.request("POST", INFER, parts, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_json_is_bounded_apart_from_binary_tensors(client):
    large = np.ones((1, 5_000_000), np.float32)
    with pytest.raises(InferenceServerException, match=rf"{MAX_JSON_BYTES} bytes of JSON, or binary tensors"):
        client.infer("doubling", [tensor("x", large, binary_data=False)])
    outputs = [tritonclient.http.InferRequestedOutput("y", binary_data=True)]
    result = client.infer("doubling", [tensor("x", large)], outputs=outputs)
    assert (result.as_numpy("y") == 2 * large).all()


@pytest.mark.attack
def test_what_the_model_refuses_is_told_without_files_of_the_server(service):
    one = {"datatype": "FP32", "shape": [1, 1], "data": [1]}
    size = {"name": "size", "datatype": "INT64", "shape": [2], "data": [-5, 3]}
    inputs = [{"name": "x", **one}, {"name": "one", **one}, size]
    status, _, said = ask("POST", "/v2/models/slow/infer", json.dumps({"inputs": inputs}).encode())
    assert status == 400
    assert "cannot run slow on these inputs" in said["error"]
    assert "onnxruntime" not in said["error"]


@pytest.mark.attack
def test_serves_proxies_pass_the_token_on(service, bundle, tmp_path):
    token = "k9" * 16
    (tmp_path / "token").write_text(token)
    config = ServeConfig(token_file=str(tmp_path / "token"))
    app = build_application(config, dict([pin_version(str(bundle))]), on_gpu=False)
    serve.run(app, name="guarded", route_prefix="/guarded")
    try:
        path = "/guarded/v2/models/doubling"
        status, headers, said = ask("GET", path)
        assert (status, headers["www-authenticate"], set(said)) == (401, "Bearer", {"error"})
        assert ask("GET", "/guarded/v2/health/ready")[0] == 200
        assert ask("GET", path, Authorization=f"Bearer {token}")[0] == 200
    finally:
        serve.delete("guarded")
