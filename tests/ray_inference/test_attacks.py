"""Clients that mean harm: a real replica, without Serve, answers them."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator

import numpy as np
import pytest
from ray.exceptions import RayTaskError, TaskCancelledError
from starlette.requests import ClientDisconnect, Request

from ortprep.bundle.codec import encode
from ortprep.errors import PipelineError, PoolError, SpecError
from ortprep.ray_inference import http_api
from ortprep.ray_inference.config import ServeConfig
from ortprep.ray_inference.deployment import BundleDeployment
from ortprep.ray_inference.pinning import pin_version
from ortprep.runtime.tensors.arrays import write_tensors
from tests.ray_inference.builders import LONG, write_sizing, write_slow
from tests.runtime.pool.builders import write_doubling

pytestmark = [
    pytest.mark.attack,
    pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning"),
]


async def open_replica(bundle, **config):
    name, pinned = pin_version(str(bundle))
    replica = BundleDeployment(encode(ServeConfig(**config)))
    await replica.reconfigure({"bundles": {name: encode(pinned)}})
    return replica


@pytest.fixture
def sizing(tmp_path):
    return write_sizing(tmp_path / "sizing")


INFER = "/v2/models/sizing/infer"


async def ask(replica, path, parts=(), **headers):
    """Sends a request as Serve's proxy does, in parts; returns the response."""

    async def list_parts():
        if isinstance(parts, AsyncIterator):
            async for part in parts:
                yield part
        else:
            for part in parts:
                yield part

    left = list_parts()

    async def receive():
        part = await anext(left, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    given = [(key.replace("_", "-").lower().encode(), value.encode()) for key, value in headers.items()]
    method = "POST" if path.endswith("/infer") else "GET"
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    return await replica(Request(scope, receive))


def body_of(shape, data):
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


TOKEN = "k9" * 16


def test_without_the_token_only_health_is_answered(sizing, tmp_path, caplog):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    body, wrong = body_of([1, 3], [1, 2, 3]), TOKEN[:-1] + "8"

    async def attack():
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

    asyncio.run(attack())
    assert not any(secret in caplog.text for secret in (TOKEN, wrong))


def test_a_replica_without_the_token_that_it_needs_does_not_start(tmp_path):
    for text in ("", "\n", "short", "with a space in the middle", "x" * 40 + "\0"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(PoolError, match="bad token") as caught:
            BundleDeployment(encode(ServeConfig(token_file=str(tmp_path / "token"))))
        assert not text.strip() or text.strip() not in str(caught.value)
    with pytest.raises(PoolError, match="cannot read the token"):
        BundleDeployment(encode(ServeConfig(token_file=str(tmp_path / "none"))))


def test_a_setting_that_nothing_reads_is_refused():
    for name in ("token_env", "token_flie"):
        with pytest.raises(SpecError, match=f"unknown setting of a deployment: '{name}'"):
            BundleDeployment({**encode(ServeConfig()), name: "TOKEN"})


def test_a_replica_of_a_bundle_that_answers_wrongly_does_not_start(tmp_path):
    one, wrong = np.ones((1, 1), np.float32), write_doubling(tmp_path / "wrong")
    write_tensors(wrong / "golden.npz", {"input:x": one, "output:y": one})
    with pytest.raises(PipelineError):
        asyncio.run(open_replica(wrong))


def test_a_token_given_as_a_name_is_not_repeated():
    with pytest.raises(PoolError, match="bad token_") as caught:
        ServeConfig(token_file=TOKEN).check()
    assert "k9" not in str(caught.value)


def test_an_answer_that_is_large_is_not_written_as_json(sizing):
    tensor = {"name": "x", "datatype": "FP32", "shape": [0, 2**20 + 1], "data": []}

    async def attack():
        replica = await open_replica(sizing)
        refused = await ask(replica, INFER, [json.dumps({"inputs": [tensor]}).encode()])
        assert refused.status_code == 413
        assert "binary_data_output" in json.loads(refused.body)["error"]
        wanted = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        served = await ask(replica, INFER, [json.dumps(wanted).encode()])
        assert served.status_code == 200
        assert len(served.body) > 4 * 2**20

    asyncio.run(attack())


def test_bodies_together_take_no_more_than_their_budget(sizing):
    """Clients that never finish hold what they sent; what is above the budget is refused, and then served."""

    async def send_half(body, goes_on):
        yield body[:-10]
        await goes_on.wait()
        yield body[-10:]

    async def attack():
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
        goes_on.set()
        assert [(await task).status_code for task in slow] == [200, 200, 200]
        for _ in range(5):
            assert (await ask(replica, INFER, [body])).status_code == 200

    asyncio.run(attack())


async def stall():
    yield b"{"
    await asyncio.Event().wait()


async def trickle():
    while True:
        yield b" "
        await asyncio.sleep(0.01)


LIMITS = {"MIN_BODY_TIMEOUT_S", "BODY_TIMEOUT_S"}


@pytest.mark.parametrize("body", [stall, trickle])
@pytest.mark.parametrize("limit", sorted(LIMITS))
def test_a_client_that_does_not_finish_its_request_is_turned_away(sizing, monkeypatch, limit, body):
    monkeypatch.setattr(http_api, limit, 0.2)
    for other in LIMITS - {limit}:  # it turns nobody away in this test
        monkeypatch.setattr(http_api, other, 1e6)

    async def attack():
        refused = await asyncio.wait_for(ask(await open_replica(sizing), INFER, body()), 20)
        assert refused.status_code == 408
        assert "0.2 s" in json.loads(refused.body)["error"]

    asyncio.run(attack())


@pytest.mark.parametrize(
    "left", [ClientDisconnect(), RayTaskError("receive", "", TaskCancelledError()).as_instanceof_cause()]
)
def test_a_client_that_leaves_before_its_body_ends_leaves_no_traceback(sizing, caplog, left):
    async def leave():
        yield b"{"
        raise left

    async def attack():
        replica = await open_replica(sizing)
        assert (await ask(replica, INFER, leave())).status_code == 499
        assert replica.bodies._held_bytes == 0

    asyncio.run(attack())
    assert "Traceback" not in caplog.text


def test_the_event_loop_goes_on_while_a_large_request_is_parsed_and_its_answer_written(tmp_path):
    count, limit = 2_000_000, 2**30
    data = ",".join(["0.5"] * count)
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [1, {count}], "data": [{data}]}}'

    async def attack():
        replica = await open_replica(
            write_doubling(tmp_path / "doubling"), max_body_bytes=limit, max_json_bytes=limit
        )
        body = f'{{"inputs": [{tensor}]}}'.encode()
        answer, turns = asyncio.create_task(ask(replica, "/v2/models/doubling/infer", [body])), 0
        while not answer.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert (await answer).status_code == 200
        assert turns > 10, "the loop waited for the conversion"

    asyncio.run(attack())


def test_a_client_that_leaves_holds_no_body_beyond_its_budget(sizing):
    may_end, kept = threading.Event(), []

    async def attack():
        replica = await open_replica(sizing)

        async def hold(body):
            kept.append(weakref.ref(body))
            await replica.convert(2**20, lambda _: may_end.wait(10), body)

        running, queued = (asyncio.create_task(hold(np.zeros(2**20))) for _ in range(2))
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
        asyncio.run(attack())
    finally:
        may_end.set()


def product_of(size):
    """A valid request to `write_slow`, which takes as long as its size says."""
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "data": data}
        for name, kind, shape, data in (
            ("x", "FP32", [1, 1], [1]),
            ("one", "FP32", [1, 1], [1]),
            ("size", "INT64", [2], [size, size]),
        )
    ]
    return json.dumps({"inputs": inputs}).encode()


async def open_slow(folder):
    """Returns a replica whose health is always checked, and the seconds that it takes for `LONG`."""
    replica = await open_replica(write_slow(folder), health_check_period_s=1e-3)
    for _ in range(2):  # the first takes longer
        begun = time.monotonic()
        assert (await ask(replica, "/v2/models/slow/infer", [product_of(LONG)])).status_code == 200
    return replica, time.monotonic() - begun


def test_valid_requests_that_fill_the_queue_do_not_make_a_replica_unhealthy(tmp_path):
    """Serve replaces a replica after three health checks in a row that took too long."""

    async def attack():
        replica, one_s = await open_slow(tmp_path / "slow")
        replica.config = dataclasses.replace(replica.config, run_timeout_s=8 * one_s)

        async def send_for_ever():
            while True:
                assert (await ask(replica, "/v2/models/slow/infer", [product_of(LONG)])).status_code == 200

        clients = [asyncio.create_task(send_for_ever()) for _ in range(replica.config.max_ongoing_requests)]
        await asyncio.sleep(one_s)
        for _ in range(6):
            await asyncio.wait_for(replica.check_health(), replica.config.run_timeout_s)
        assert replica._checked_at > time.monotonic() - 30 * one_s, "golden samples have their turn"
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        await replica.check_health()

    asyncio.run(attack())


def test_a_run_that_hangs_makes_a_replica_unhealthy(tmp_path):
    async def attack():
        replica, one_s = await open_slow(tmp_path / "slow")
        replica.config = dataclasses.replace(replica.config, run_timeout_s=one_s / 2)
        hanging = asyncio.create_task(ask(replica, "/v2/models/slow/infer", [product_of(2 * LONG)]))
        await asyncio.sleep(one_s / 4)

        async def watch():
            while not hanging.done():
                await replica.check_health()

        with pytest.raises(PoolError, match="a run hangs"):
            await watch()
        await hanging
        replica.config = dataclasses.replace(replica.config, run_timeout_s=60)  # the machine may be busy
        await replica.check_health()

    asyncio.run(attack())
