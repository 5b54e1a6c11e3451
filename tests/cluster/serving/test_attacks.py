"""Clients that mean harm: a real replica, without Serve, answers them over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from starlette.requests import Request
from tritonclient.grpc import service_pb2

from ortprep.bundle.codec import encode
from ortprep.cluster.serving.config import ServeConfig
from ortprep.cluster.serving.deployment import BundleDeployment
from ortprep.cluster.serving.pinning import pin_version
from tests.cluster.serving.builders import write_sizing

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
def sizing(tmp_path: Path) -> Path:
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


def message_of(shape: list[int], data: bytes = b"") -> Any:
    message = service_pb2.ModelInferRequest(model_name="sizing", raw_input_contents=[data])
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    return message


def body_of(shape: list[int], data: list[float]) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_request_of_some_bytes_takes_no_gigabytes(sizing: Path) -> None:
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
