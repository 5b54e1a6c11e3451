"""Clients that mean harm: a real replica, without Serve, answers them over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer
from starlette.requests import Request
from tritonclient.grpc import service_pb2

from ortprep.bundle.codec import encode
from ortprep.cluster.serving.config import ServeConfig
from ortprep.cluster.serving.deployment import BundleDeployment
from ortprep.cluster.serving.grpc_api import add_servicer
from ortprep.cluster.serving.pinning import pin_version
from ortprep.errors import PipelineError, PoolError
from ortprep.runtime.tensors.arrays import write_tensors
from tests.cluster.serving.builders import write_sizing
from tests.runtime.pool.builders import write_doubling

pytestmark = [
    pytest.mark.attack,
    pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning"),
]


async def open_replica(bundle: Path, **config: Any) -> BundleDeployment:
    name, pinned = pin_version(str(bundle))
    replica = BundleDeployment(encode(ServeConfig(**config)))
    await replica.reconfigure({"bundles": {name: encode(pinned)}})
    return replica


@pytest.fixture
def sizing(tmp_path):
    return write_sizing(tmp_path / "sizing")


INFER = "/v2/models/sizing/infer"


async def ask(
    replica: BundleDeployment, path: str, parts: Iterable[bytes] | AsyncIterator[bytes] = (), **headers: str
) -> Any:
    """Sends a request as Serve's proxy does, in parts; returns the response."""

    async def list_parts() -> AsyncIterator[bytes]:
        if isinstance(parts, AsyncIterator):
            async for part in parts:
                yield part
        else:
            for part in parts:
                yield part

    left = list_parts()

    async def receive() -> dict[str, Any]:
        part = await anext(left, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    given = [(key.replace("_", "-").lower().encode(), value.encode()) for key, value in headers.items()]
    method = "POST" if path.endswith("/infer") else "GET"
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    return await replica(Request(scope, receive))


class Call:
    """What Serve gives a gRPC method to answer with, beside its message."""

    def __init__(self, **metadata: str) -> None:
        self.metadata, self.code, self.details = list(metadata.items()), grpc.StatusCode.OK, ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def message_of(shape: list[int], data: bytes = b"") -> bytes:
    message = service_pb2.ModelInferRequest(model_name="sizing", raw_input_contents=[data])
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    return bytes(message.SerializeToString())


def body_of(shape: list[int], data: list[float]) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_request_of_some_bytes_takes_no_gigabytes(sizing):
    async def attack() -> None:
        replica, call = await open_replica(sizing), Call()
        body = body_of([0, 200_000_000], [])
        assert len(body) < 100
        refused = await ask(replica, INFER, [body])
        assert refused.status_code == 400
        assert b"sizes beside the 0" in refused.body
        await replica.ModelInfer(message_of([0, 200_000_000]), call)
        assert call.code == grpc.StatusCode.INVALID_ARGUMENT
        served = await ask(replica, INFER, [body_of([0, 5], [])])
        assert json.loads(served.body)["outputs"][0]["data"] == [0.0] * 5

    asyncio.run(attack())


TOKEN = "k9" * 16


def test_without_the_token_only_health_is_answered(sizing, tmp_path, caplog):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    body, wrong = body_of([1, 3], [1, 2, 3]), TOKEN[:-1] + "8"

    async def attack() -> None:
        replica = await open_replica(sizing, token_file=str(tmp_path / "token"))
        for path in ("/v2", "/v2/models/sizing", "/v2/models/sizing/ready", INFER, "/v2/models/none", "/"):
            given = ("", wrong, f"Bearer {wrong}", f"Basic {TOKEN}", TOKEN, "Bearer ", f"Bearer {TOKEN}é")
            for header in ({}, *({"Authorization": value} for value in given)):
                refused = await ask(replica, path, [body], **header)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await ask(replica, path)).status_code == 200
        served = await ask(replica, INFER, [body], Authorization=f"Bearer {TOKEN}")
        assert json.loads(served.body)["outputs"][0]["data"] == [0, 0, 0]
        for method, message in (
            (replica.ServerMetadata, b""),
            (replica.ModelReady, service_pb2.ModelReadyRequest(name="sizing").SerializeToString()),
            (replica.ModelMetadata, service_pb2.ModelMetadataRequest(name="sizing").SerializeToString()),
            (replica.ModelInfer, message_of([1, 3], bytes(12))),
        ):
            for call in (Call(), Call(authorization=f"Bearer {wrong}")):
                refused = await method(message, call)
                assert call.code == grpc.StatusCode.UNAUTHENTICATED
                assert refused.ByteSize() == 0
            await method(message, call := Call(authorization=f"bearer {TOKEN}"))
            assert call.code == grpc.StatusCode.OK

    asyncio.run(attack())
    assert not any(secret in caplog.text for secret in (TOKEN, wrong))


def test_a_replica_without_the_token_that_it_needs_does_not_start(tmp_path):
    for text in ("", "\n", "short", "with a space in the middle", "x" * 40 + "\0"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(PoolError, match="bad token") as caught:
            BundleDeployment(encode(ServeConfig(token_file=str(tmp_path / "token"))))
        assert not text.strip() or text.strip() not in str(caught.value)
    for config in (ServeConfig(token_env="NO_SUCH_TOKEN"), ServeConfig(token_file=str(tmp_path / "none"))):
        with pytest.raises(PoolError, match="token"):
            BundleDeployment(encode(config))


def test_a_replica_of_a_bundle_that_answers_wrongly_does_not_start(tmp_path):
    one, wrong = np.ones((1, 1), np.float32), write_doubling(tmp_path / "wrong")
    write_tensors(wrong / "golden.npz", {"input:x": one, "output:y": one})
    with pytest.raises(PipelineError):
        asyncio.run(open_replica(wrong))


def test_a_token_given_as_a_name_is_not_repeated():
    for config in (ServeConfig(token_env="k9-" * 16), ServeConfig(token_file=TOKEN)):
        with pytest.raises(PoolError, match="bad token_") as caught:
            config.check()
        assert "k9" not in str(caught.value)


def test_a_message_has_no_more_bytes_than_a_body(sizing):
    numbers = service_pb2.ModelInferRequest(model_name="sizing")
    tensor = numbers.inputs.add(name="x", datatype="FP32", shape=[1, 300])
    tensor.contents.fp32_contents.extend([1.0] * 300)
    empty = service_pb2.ModelInferRequest(model_name="sizing", raw_input_contents=[b""] * 1000)

    async def attack() -> None:
        replica = await open_replica(sizing, max_body_bytes=4096, max_json_bytes=1024)
        texts = [message.SerializeToString() for message in (numbers, empty)]
        for message in (message_of([1, 1024], bytes(4096)), *texts):
            await replica.ModelInfer(message, call := Call())
            assert call.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "request is too large" in call.details
        await replica.ModelInfer(message_of([1, 900], bytes(3600)), call := Call())
        assert call.code == grpc.StatusCode.OK
        replica = await open_replica(sizing)  # with the usual limits
        query = service_pb2.ModelReadyRequest(name="x" * 2**16).SerializeToString()
        for ask_about in (replica.ModelReady, replica.ModelMetadata):
            await ask_about(query, call := Call())
            assert "request is too large" in call.details

    asyncio.run(attack())


EMPTY_INPUT = b"\x2a\x00"
"""Two bytes that take a hundred as a message."""


def test_a_proxy_passes_a_message_on_as_the_bytes_that_came():
    attack_bytes, pickles = EMPTY_INPUT * 500_000, []

    def make_handler(service_method: str, **_: Any) -> Any:
        async def answer(request: Any, _: Any) -> bytes:
            pickles.append((service_method, pickle.dumps(request)))
            return b"answer"

        return answer

    async def attack() -> bytes:
        server = gRPCGenericServer(make_handler)
        add_servicer(BundleDeployment, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer = await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(attack_bytes)
                stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await stream(iter([attack_bytes])).read()
            return bytes(answer)
        finally:
            await server.stop(None)

    assert asyncio.run(attack()) == b"answer"
    assert pickles == [("/inference.GRPCInferenceService/ModelInfer", pickle.dumps(attack_bytes))]


def test_a_message_is_parsed_after_its_token_and_fields_are_checked(sizing, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    valid = message_of([1, 3], bytes(12))
    cases = [
        (valid, grpc.StatusCode.OK),
        (valid + EMPTY_INPUT * 1_000_000, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\x3a\x00" * 5000, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\x0a\x01\xff", grpc.StatusCode.INVALID_ARGUMENT),  # a name that is not UTF-8
        (valid[:-1], grpc.StatusCode.INVALID_ARGUMENT),
        (b"\xff" * 100, grpc.StatusCode.INVALID_ARGUMENT),
    ]

    async def attack() -> None:
        replica = await open_replica(sizing, token_file=str(tmp_path / "token"))
        for message, code in cases:
            await replica.ModelInfer(message, call := Call())
            assert call.code == grpc.StatusCode.UNAUTHENTICATED
            await replica.ModelInfer(message, call := Call(authorization=f"Bearer {TOKEN}"))
            assert call.code == code, call.details
        for method in (replica.ModelReady, replica.ModelMetadata):
            await method(b"\x0a\x01\xff", call := Call(authorization=f"Bearer {TOKEN}"))
            assert call.code == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(attack())


def test_an_answer_that_is_large_is_not_written_as_json(sizing):
    tensor = {"name": "x", "datatype": "FP32", "shape": [0, 2**20 + 1], "data": []}

    async def attack() -> None:
        replica = await open_replica(sizing)
        refused = await ask(replica, INFER, [json.dumps({"inputs": [tensor]}).encode()])
        assert refused.status_code == 413
        assert "binary_data_output" in json.loads(refused.body)["error"]
        wanted = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        served = await ask(replica, INFER, [json.dumps(wanted).encode()])
        assert served.status_code == 200
        assert len(served.body) > 4 * 2**20

    asyncio.run(attack())


@pytest.mark.parametrize("unit", ["[[[[[[[[[[0]]]]]]]]]],", "[0],", "[],", '{"":0},'])
def test_lists_and_objects_are_counted_before_json_is_parsed(sizing, unit):
    lists = (unit * (2**20 // len(unit))).rstrip(",")
    tensor = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [%s]}]}'
    shape = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%s], "data": [1]}]}'
    rows: Any = [[0.5, 1.5]] * 20_000

    async def attack() -> None:
        replica = await open_replica(sizing)
        for text in (tensor, shape):
            refused = await ask(replica, INFER, [(text % lists).encode()])
            assert refused.status_code == 413
            assert b"too many lists" in refused.body
        assert (await ask(replica, INFER, [body_of([20_000, 2], rows)])).status_code == 200

    asyncio.run(attack())


def test_bodies_together_take_no_more_than_their_budget(sizing):
    """Clients that never finish hold what they sent; what is above the budget is refused, and then served."""

    async def send_half(body: bytes, goes_on: asyncio.Event) -> AsyncIterator[bytes]:
        yield body[:-10]
        await goes_on.wait()
        yield body[-10:]

    async def attack() -> None:
        body = body_of([1, 200], [0.5] * 200)
        limit = 3 * len(body)
        replica = await open_replica(
            sizing, max_body_bytes=limit, max_json_bytes=limit, max_inflight_bytes=limit
        )
        goes_on = asyncio.Event()
        slow = [asyncio.create_task(ask(replica, INFER, send_half(body, goes_on))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = await ask(replica, INFER, [body])
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await replica.ModelInfer(message_of([1, 200], bytes(800)), call := Call())
        assert call.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        goes_on.set()
        assert [(await task).status_code for task in slow] == [200, 200, 200]
        for _ in range(5):
            assert (await ask(replica, INFER, [body])).status_code == 200

    asyncio.run(attack())
