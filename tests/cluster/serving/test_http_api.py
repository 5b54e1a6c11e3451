"""A replica answers HTTP requests whose client does not do its part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from ortprep.bundle.loader_config import TensorSpec
from ortprep.cluster.serving import http_api
from ortprep.cluster.serving.admission import BodyBudget
from ortprep.cluster.serving.config import ServeConfig
from ortprep.cluster.serving.deployment import BundleDeployment

BODY = {"type": "http.request", "body": b"{", "more_body": True}


class Doubling(http_api.HttpMethods):
    """A replica without Serve."""

    token = None
    bodies = BodyBudget(2**30)
    convert = BundleDeployment.convert

    def __init__(self, config: ServeConfig | None = None) -> None:
        x, y = TensorSpec("x", "float32", ("n",)), TensorSpec("y", "float32", ("n",))
        self.config = config or ServeConfig(max_body_bytes=2**30, max_json_bytes=2**30)
        self._converter = ThreadPoolExecutor(1)
        loader = SimpleNamespace(name="net", inputs=(x,), outputs=(y,))
        model = SimpleNamespace(name="net", version="1", opened=SimpleNamespace(config=loader))
        self.find_model = lambda *_: model

    async def infer(self, _: Any, arrays: Any) -> Any:
        return [2 * arrays[0]]


@pytest.mark.attack
def test_a_client_that_does_not_finish_its_request_is_turned_away(monkeypatch):
    monkeypatch.setattr(http_api, "BODY_TIMEOUT_S", 0.05)
    parts = iter([BODY])

    async def receive() -> Any:
        for part in parts:
            return part
        return await asyncio.Event().wait()

    replica = Doubling(ServeConfig(max_body_bytes=1000, max_json_bytes=1000))
    scope = {"type": "http", "method": "POST", "path": "/v2/models/net/infer", "headers": []}
    answer = asyncio.run(asyncio.wait_for(replica(Request(scope, receive)), 10))
    assert answer.status_code == 408
    assert "within 0.05 s, got 1 bytes" in json.loads(answer.body)["error"]


def test_the_event_loop_goes_on_while_a_large_request_is_parsed_and_its_answer_written():
    count, replica = 2_000_000, Doubling()
    data = ",".join(["0.5"] * count)
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [{count}], "data": [{data}]}}'
    body = {"type": "http.request", "body": f'{{"inputs": [{tensor}]}}'.encode()}
    scope = {"type": "http", "method": "POST", "path": "/v2/models/net/infer", "headers": []}

    async def receive() -> Any:
        return body

    async def count_turns() -> tuple[int, int]:
        answer, turns = asyncio.create_task(replica(Request(scope, receive))), 0
        while not answer.done():
            await asyncio.sleep(0.001)
            turns += 1
        return (await answer).status_code, turns

    status, turns = asyncio.run(count_turns())
    replica._converter.shutdown()
    assert status == 200
    assert turns > 10, "the loop waited for the conversion"


@pytest.mark.attack
def test_a_client_that_leaves_holds_no_body_beyond_its_budget():
    may_end = threading.Event()
    replica: Any = Doubling()

    async def hold(body: Any, kept: list[Any]) -> None:
        kept.append(weakref.ref(body))
        await replica.convert(2**20, lambda _: may_end.wait(10), body)

    async def leave() -> None:
        kept: list[Any] = []
        running, queued = (asyncio.create_task(hold(np.zeros(2**20), kept)) for _ in range(2))
        await asyncio.sleep(0.05)
        running.cancel(), queued.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await queued
        await asyncio.sleep(0)
        assert kept[1]() is None, "it waits in the queue"
        assert not running.done(), "its body is in use"
        may_end.set()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)
        assert kept[0]() is None

    try:
        asyncio.run(leave())
    finally:
        may_end.set()
        replica._converter.shutdown()
