"""How many replicas a cluster has room for, and how their application is described."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.cluster import ServeConfig
from ortprep.cluster.nodes import ClusterNode
from ortprep.cluster.serving.application import build_application
from ortprep.cluster.serving.config import count_replicas
from ortprep.errors import PoolError


def gpu_nodes(counts: list[int]) -> list[ClusterNode]:
    return [ClusterNode(f"n{n}", f"h{n}", {}, {"CPU": 64, "GPU": gpus}) for n, gpus in enumerate(counts)]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 10_000))
def test_the_gpus_have_room_for_all_replicas_and_for_no_other(counts: list[int], share: int) -> None:
    """Each GPU has 10,000 parts, as Ray counts them; the parts of a replica are of one GPU."""
    on_gpu, replicas = count_replicas(ServeConfig(gpus=share / 10_000), gpu_nodes(counts))
    left = [10_000] * sum(counts)
    for _ in range(min(replicas, 200)):
        at = next(at for at, parts in enumerate(left) if parts >= share)
        left[at] -= share
    assert on_gpu
    assert replicas > 200 or max(left) < share
    assert replicas % sum(counts) == 0


@pytest.mark.parametrize(("share", "gpus", "expected"), [(0.6, 2, 2), (1 / 3, 2, 6), (0.1, 1, 10), (1, 3, 3)])
def test_shares_of_gpus(share: float, gpus: int, expected: int) -> None:
    assert count_replicas(ServeConfig(gpus=share), gpu_nodes([gpus])) == (True, expected)


def test_a_replica_has_one_gpu_at_most() -> None:
    with pytest.raises(PoolError, match="expected one GPU or a part of one, got 2"):
        ServeConfig(gpus=2).check()


def test_several_threads_describe_applications_at_once() -> None:
    def build(_: int) -> Any:
        return build_application(ServeConfig(), {}, on_gpu=False, replicas=1)

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(build, range(200)))) == 200
