"""What a pool decides without a cluster: calls, places, models, and which nodes it uses."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bundle.codec import encode
from pipeline.bundle.loader_config import Variant
from pipeline.cluster.serving import scouting
from pipeline.cluster.serving.fleet import check_agreement, compare_nodes
from pipeline.cluster.serving.nodes import ClusterNode, NodeChoice, choose_devices, parse_nodes
from pipeline.cluster.serving.packing import SMALL_BYTES, Call, Parcel, find_suspects, pack_call
from pipeline.cluster.serving.placing import choose_heir, place_joining
from pipeline.cluster.serving.posts import Wanted, plan_posts
from pipeline.cluster.serving.scouting import show_gpus
from pipeline.cluster.serving.session_actor import plan_environment
from pipeline.cluster.serving.survey import Errand, Survey, read_survey, survey_node
from pipeline.errors import PoolError
from pipeline.runtime.pool.placement import ModelLoad, Room
from tests.runtime.pool.pool_bundles import write_doubling, write_passing_on

MB = 2**20
parcels = st.lists(
    st.builds(Parcel, st.integers(0, 10**6), st.integers(0, 2 * SMALL_BYTES), st.booleans()), max_size=60
)


def node(name: str, cpus: float = 4, gpus: int = 0, **labels: str) -> ClusterNode:
    return ClusterNode(name * 8, "10.0.0.1", cpus, gpus, None, labels)


@given(parcels, st.integers(1, 20))
def test_every_request_travels_once_and_in_order(waiting: list[Parcel], most: int) -> None:
    queue, calls = deque(waiting), []
    while (call := pack_call(queue, most=most)) is not None:
        calls.append(call)
    assert [number for call in calls for number in call.numbers] == [parcel.number for parcel in waiting]


@given(parcels, st.integers(1, 20))
def test_a_call_is_small_or_one_request(waiting: list[Parcel], most: int) -> None:
    queue, rest = deque(waiting), list(waiting)
    while (call := pack_call(queue, most=most)) is not None:
        taken, rest = rest[: len(call.numbers)], rest[len(call.numbers) :]
        assert len(taken) <= most
        assert len(taken) == 1 or sum(parcel.size_bytes for parcel in taken) <= SMALL_BYTES
        assert len(taken) == 1 or not any(parcel.alone for parcel in taken)
        assert call.is_large == (taken[0].size_bytes > SMALL_BYTES)


def test_an_actor_may_have_died_of_its_oldest_call_only() -> None:
    assert find_suspects([Call((1, 2)), Call((3,))]) == (1, 2)
    assert find_suspects([]) == ()


def test_nodes_are_read_as_ray_lists_them() -> None:
    listed = [
        {
            "NodeID": "b" * 56,
            "Alive": True,
            "NodeManagerAddress": "10.0.0.2",
            "Resources": {"CPU": 8.0, "GPU": 2.0, "memory": 1e9},
            "Labels": {"zone": "a"},
        },
        {"NodeID": "c" * 56, "Alive": False, "Resources": {"CPU": 8.0}},
        {"NodeID": "a" * 56, "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {}},
    ]
    head, worker = parse_nodes(listed)
    assert (head.cpus, head.gpus, head.memory_bytes) == (0, 0, None)
    assert worker == ClusterNode("b" * 56, "10.0.0.2", 8.0, 2, 10**9, {"zone": "a"})
    assert worker.name == "10.0.0.2-bbbbbbbb"
    assert not NodeChoice().admits(head)
    assert NodeChoice("cuda", {"zone": "a"}).admits(worker)
    assert not NodeChoice("cuda", {"zone": "b"}).admits(worker)


def test_a_device_cannot_be_named_by_its_number_across_nodes() -> None:
    with pytest.raises(PoolError, match="expected one of all, cpu, cuda"):
        choose_devices("cuda:0")


def test_a_cpu_node_is_divided_among_its_workers() -> None:
    posts = plan_posts(node("a", cpus=8), Wanted(workers_per_device=2), memory_bytes=None)
    assert [(post.num_cpus, post.num_gpus, post.workplace.threads) for post in posts] == [(4, 0, 4)] * 2
    assert [post.workplace.device_id for post in posts] == [None, None]
    assert [post.name for post in posts] == ["10.0.0.1-aaaaaaaa/cpu/0", "10.0.0.1-aaaaaaaa/cpu/1"]


def test_the_threads_of_a_node_are_never_more_than_its_processors_but_one_each() -> None:
    for cpus in (1, 2, 3, 7, 64):
        for workers in (1, 2, 3, 5):
            posts = plan_posts(node("a", cpus=cpus), Wanted(workers_per_device=workers), memory_bytes=None)
            assert sum(post.num_cpus for post in posts) <= cpus
            assert sum(post.workplace.threads or 0 for post in posts) <= max(cpus, workers)


def test_a_gpu_node_has_an_actor_per_gpu_that_sees_it_as_the_first() -> None:
    posts = plan_posts(node("a", cpus=16, gpus=2), Wanted(workers_per_device=3), memory_bytes=80 * MB)
    assert [(post.slot, post.index) for post in posts] == [(g, w) for g in range(2) for w in range(3)]
    assert {post.num_cpus for post in posts} == {1.0}
    assert all(0.33 < post.num_gpus <= 1 / 3 for post in posts)
    assert {post.workplace.device_id for post in posts} == {0}


def test_a_node_without_what_is_asked_for_is_refused() -> None:
    with pytest.raises(PoolError, match="has no GPU for workers"):
        plan_posts(node("a"), Wanted(devices="cuda"), memory_bytes=None)
    with pytest.raises(PoolError, match="too few CPUs"):
        plan_posts(node("a", cpus=4), Wanted(workers_per_device=2, cpus_per_worker=3), memory_bytes=None)


def test_a_cpu_worker_sees_no_gpu_and_a_gpu_worker_exactly_one() -> None:
    assert plan_environment("cpu", "0,1") == {"CUDA_VISIBLE_DEVICES": ""}
    assert plan_environment("cuda", "3") == {"CUDA_MODULE_LOADING": "LAZY"}
    for visible in (None, "", "0,1"):
        with pytest.raises(PoolError, match="expected one device in CUDA_VISIBLE_DEVICES"):
            plan_environment("cuda", visible)


def test_models_that_nobody_serves_come_first_and_the_busiest_fills_what_is_empty() -> None:
    loads = [ModelLoad("det", 9.0, 10 * MB), ModelLoad("cls", 4.0, 10 * MB)]
    rooms = [Room(str(n), 100 * MB) for n in range(3)]
    assert place_joining(loads, rooms, {}) == (("det",), ("cls",), ("det",))
    assert place_joining(loads, rooms[:1], {"det": 1}) == (("cls",),)
    assert place_joining(loads, rooms[:1], {"det": 1, "cls": 1}) == (("det",),)
    assert place_joining(loads, rooms[:1], {"det": 3, "cls": 1}) == (("cls",),)


def test_a_node_too_small_for_any_model_serves_none() -> None:
    loads = [ModelLoad("det", 9.0, 10 * MB)]
    assert place_joining(loads, [Room("0", MB)], {"det": 1}) == ((),)
    with pytest.raises(PoolError, match="no device has room for det"):
        place_joining(loads, [Room("0", MB)], {})


def test_a_model_whose_last_worker_is_gone_goes_to_the_one_with_least_to_do_and_room() -> None:
    det, cls, seg = (ModelLoad(name, cost, 10 * MB) for name, cost in (("det", 9), ("cls", 4), ("seg", 1)))
    taken = {0: [det], 1: [cls], 2: [seg]}
    rooms = {0: Room("0", 30 * MB), 1: Room("1", 30 * MB), 2: Room("2", 10 * MB)}
    assert choose_heir(ModelLoad("new", 1.0, 10 * MB), taken, rooms) == 1
    with pytest.raises(PoolError, match="no worker is left for new"):
        choose_heir(ModelLoad("new", 1.0, 100 * MB), taken, rooms)


def test_nodes_that_join_leave_or_are_too_many_are_told_apart() -> None:
    a, b, c = node("a"), node("b"), node("c", cpus=0)
    ids = {"a": a.node_id, "b": b.node_id}
    assert compare_nodes((), [a, b, c], NodeChoice()).joined == (a, b)
    assert compare_nodes((ids["a"],), [a, b], NodeChoice()).joined == (b,)
    assert compare_nodes((ids["a"],), [a, b], NodeChoice(), 1).joined == ()
    assert compare_nodes((ids["a"], ids["b"]), [b], NodeChoice()).lost == (ids["a"],)
    assert compare_nodes((ids["a"], ids["b"]), [a, b], NodeChoice(), 1).surplus == (ids["b"],)
    # A node takes the place of one that is lost.
    change = compare_nodes((ids["a"],), [b], NodeChoice(), 1)
    assert (change.joined, change.lost) == ((b,), (ids["a"],))


def survey(folder: Path) -> Survey:
    return read_survey(survey_node(encode(Errand({"": str(folder)}))), "node")


def test_nodes_agree_on_a_build_though_each_may_have_variants_of_its_own(tmp_path: Path) -> None:
    first, node_b = survey(write_doubling(tmp_path / "a" / "net")), node("b")
    check_agreement(first, survey(tmp_path / "a" / "net"), node_b)
    (model,), (variant,) = first.models, first.models[0].config.variants

    def with_variants(*variants: Variant) -> Survey:
        return replace(first, models=(replace(model, config=replace(model.config, variants=variants)),))

    check_agreement(first, with_variants(replace(variant, name="cuda")), node_b)
    with pytest.raises(PoolError, match="got others of the same name: cpu"):
        check_agreement(first, with_variants(replace(variant, model="cpu/other.onnx")), node_b)
    other = write_passing_on(tmp_path / "b" / "net", "float32", np.ones((1, 1), np.float32))
    with pytest.raises(PoolError, match=r"10\.0\.0\.1-bbbbbbbb has another build in the place of net"):
        check_agreement(first, survey(other), node_b)


def test_a_node_of_an_older_ray_is_asked_by_a_task_that_sees_its_gpus() -> None:
    asked = {"runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}}
    assert show_gpus("2.50.0") == show_gpus("2.59.1") == asked
    assert show_gpus("2.60.0") == show_gpus("3.0.0.dev0") == {}


def lost(problem: Exception) -> PoolError:
    error = PoolError("cannot say what it has")
    error.__cause__ = problem
    return error


@pytest.mark.parametrize(
    ("problem", "looks", "has_left"),
    [
        (ray.exceptions.WorkerCrashedError(), 3, True),  # the cluster notices after a moment
        (ray.exceptions.WorkerCrashedError(), 10**6, False),
        (ray.exceptions.RayTaskError("survey", "", ImportError()), 3, False),  # a node that answers is there
        (ray.exceptions.RayTaskError("survey", "", ImportError()), 0, True),
    ],
)
def test_a_node_is_lost_only_when_the_cluster_says_so_in_time(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, looks: int, has_left: bool
) -> None:
    listings = itertools.chain(
        itertools.repeat((node("a"), node("b")), looks), itertools.repeat((node("b"),))
    )
    monkeypatch.setattr(scouting, "list_nodes", lambda: next(listings))
    monkeypatch.setattr(scouting, "_LEAVING_S", 0.5)
    assert scouting._has_left(node("a"), lost(problem)) is has_left
