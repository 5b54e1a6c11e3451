"""A pool over a deployment on a real cluster answers as one on a single machine does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ray import serve

from ortprep.cluster import RaySessionPool, ServeConfig
from ortprep.errors import (
    BundleError,
    IntegrityError,
    InvalidRequestError,
    PoolClosedError,
    PoolError,
    RequestTimeoutError,
    RunError,
)
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.tensors.arrays import write_tensors
from tests.cluster.builders import SmallCluster
from tests.cluster.serving.conftest import batch
from tests.fakes import wait_for
from tests.runtime.pool.builders import write_difference, write_doubling, write_passing_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray"),
]

ONE = np.ones((1, 1), np.float32)


@pytest.fixture(scope="module")
def pool(served: SmallCluster, bundle: Path) -> Iterator[RaySessionPool]:
    with RaySessionPool(bundle, ServeConfig(max_pending=64, cpus=0.4)) as made:
        yield made


def test_every_node_has_a_replica(pool: RaySessionPool, served: SmallCluster) -> None:
    assert pool.stats().replicas == {"RUNNING": len(served.nodes)}
    assert len(served.replicas()) == len(served.nodes)


def test_the_answers_are_those_of_a_pool_on_one_machine(pool: RaySessionPool, bundle: Path) -> None:
    with SessionPool(bundle, PoolConfig(devices="cpu")) as local:
        for size in (1, 4, 300_000):
            here, there = local.run(batch(3, size)), pool.run(batch(3, size))
            assert here.keys() == there.keys()
            assert here["y"].dtype == there["y"].dtype
            assert here["y"].tobytes() == there["y"].tobytes()


def test_requests_are_answered_in_whatever_way_they_are_made(pool: RaySessionPool) -> None:
    expected = 2 * batch(5)["x"]
    assert (pool.submit(batch(5)).result(300)["y"] == expected).all()
    assert (asyncio.run(pool.arun(batch(5)))["y"] == expected).all()
    firsts = [float(answer["y"][0, 0]) for answer in pool.map(batch(n) for n in range(100))]
    assert firsts == [2.0 * n for n in range(100)]
    unordered = {float(a["y"][0, 0]) for a in pool.map((batch(n) for n in range(50)), ordered=False)}
    assert unordered == {2.0 * n for n in range(50)}
    rows = np.arange(60, dtype=np.float32).reshape(15, 4)
    assert (pool.run_split({"x": rows})["y"] == 2 * rows).all()
    assert (pool.run_all(batch(5))["doubling"]["y"] == expected).all()


def test_small_requests_share_calls(pool: RaySessionPool) -> None:
    before = pool.stats().counts
    for future in [pool.submit(batch(n)) for n in range(64)]:
        future.result(300)
    after = pool.stats().counts
    assert after.served - before.served == 64
    assert after.calls - before.calls < 64


def test_small_answers_and_copies_can_be_written_to(pool: RaySessionPool) -> None:
    pool.run(batch())["y"][...] = 0
    pool.run(batch(1, 100_000), copy=True)["y"][...] = 0
    assert not pool.run(batch(1, 100_000))["y"].flags.writeable


@pytest.mark.parametrize(
    ("inputs", "message"),
    [({}, "got none"), ({"x": np.ones((1, 2))}, "expected float32, got float64"), ({"z": 1}, "got z")],
)
def test_inputs_that_are_not_the_models_are_refused(
    pool: RaySessionPool, inputs: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        pool.run(inputs)


def test_what_onnx_runtime_refuses_fails_alone(pool: RaySessionPool) -> None:
    wrong = pool.submit({"x": np.ones((1, 2, 3), np.float32)})
    right = [pool.submit(batch(n)) for n in range(10)]
    with pytest.raises(RunError, match="ONNX Runtime cannot run doubling"):
        wrong.result(300)
    assert [float(future.result(300)["y"][0, 0]) for future in right] == [2.0 * n for n in range(10)]


def test_a_deadline_that_passes_is_an_error(pool: RaySessionPool) -> None:
    with pytest.raises(RequestTimeoutError):
        pool.run(batch(), timeout_s=0.0)
    assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()


def test_another_pool_may_use_the_same_application(pool: RaySessionPool) -> None:
    with RaySessionPool(name=pool.name) as second:
        assert second.models == ("doubling",)
        assert float(second.run(batch(4))["y"][0, 0]) == 8.0
        with pytest.raises(PoolError, match="no such application"):
            RaySessionPool(name="nobody")
    with pytest.raises(PoolClosedError):
        second.run(batch())
    assert float(pool.run(batch(4))["y"][0, 0]) == 8.0


def test_a_pool_does_not_mistake_an_update_s_inputs_for_others(nodes: SmallCluster, tmp_path: Path) -> None:
    config = ServeConfig(replicas=1, cpus=0.1)
    names = (["a", "b"], ["b", "a"])
    first, second = (write_difference(tmp_path / "-".join(each), each) for each in names)
    inputs = {"a": 5 * ONE, "b": 3 * ONE}
    try:
        with RaySessionPool({"net": first}, config, name="updated") as old:
            assert old.run(inputs)["y"] == 2
            with RaySessionPool({"net": second}, config, name="updated") as new:
                assert new.run(inputs)["y"] == 2
                with pytest.raises(InvalidRequestError, match="now has other inputs or outputs"):
                    old.run(inputs)
    finally:
        serve.delete("updated")


def test_several_models_share_replicas_and_a_closed_pool_leaves_none(
    nodes: SmallCluster, bundle: Path, tmp_path: Path
) -> None:
    before = set(nodes.replicas())
    same = write_passing_on(tmp_path / "same", "float32", ONE)
    with RaySessionPool({"a": bundle, "b": same}, ServeConfig(replicas=1, cpus=0.1)) as pool:
        assert len(set(nodes.replicas()) - before) == 1
        assert {name: float(y["y"][0, 0]) for name, y in pool.run_all(batch(3)).items()} == {"a": 6, "b": 3}
        with pytest.raises(InvalidRequestError, match="which model"):
            pool.run(batch())
        futures = [pool.submit(batch(n), model="a") for n in range(50)]
    assert [float(future.result(0)["y"][0, 0]) for future in futures] == [2.0 * n for n in range(50)]
    wait_for(lambda: set(nodes.replicas()) <= before, what="its replicas end")


def test_a_bundle_that_cannot_be_served_is_an_error_of_its_own_kind(
    nodes: SmallCluster, bundle: Path, tmp_path: Path
) -> None:
    wrong = write_doubling(tmp_path / "wrong")
    write_tensors(wrong / "golden.npz", {"input:x": ONE, "output:y": ONE})
    loads = ServeConfig(replicas=1, cpus=0.1)
    with pytest.raises(IntegrityError, match=r"golden\.npz"):  # as the node said
        RaySessionPool(wrong, loads)
    with pytest.raises(BundleError, match="nothere"):
        RaySessionPool(tmp_path / "nothere", loads)
    with pytest.raises(PoolError, match="no node to serve on"):
        RaySessionPool(bundle, ServeConfig(labels={"zone": "nowhere"}))
    with pytest.raises(RequestTimeoutError, match="replicas were not ready"):
        RaySessionPool(bundle, ServeConfig(replicas=5, start_timeout_s=4, run_timeout_s=1))


def test_a_bundle_that_is_replaced_in_its_folder_is_refused(nodes: SmallCluster, tmp_path: Path) -> None:
    from ortprep.cluster.serving.pinning import pin_version, require_version

    folder = write_doubling(tmp_path / "net")
    name, pinned = pin_version(str(folder))
    assert name == "net"
    require_version(pinned, folder)
    shutil.rmtree(folder)
    write_passing_on(folder, "float32", ONE)
    with pytest.raises(IntegrityError, match="another build"):
        require_version(pinned, folder)
