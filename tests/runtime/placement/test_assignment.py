from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import PoolError
from ortprep.runtime.placement.assignment import ModelLoad, Room, place_models

_MODELS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=1, max_size=6).map(
    lambda pairs: [ModelLoad(f"m{n}", float(cost), memory) for n, (cost, memory) in enumerate(pairs)]
)


def best_makespan(models: list[ModelLoad], devices: int) -> float:
    return min(
        max(sum(m.cost_ms for m, at in zip(models, places, strict=True) if at == d) for d in range(devices))
        for places in itertools.product(range(devices), repeat=len(models))
    )


@given(_MODELS, st.integers(1, 3))
def test_without_limits_the_makespan_is_within_a_third_of_the_best(models, devices):
    placement = place_models(models, [Room(f"cuda:{n}", None) for n in range(devices)])
    assert placement.makespan_ms <= best_makespan(models, devices) * (4 / 3) + 1e-5


@given(_MODELS, st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_every_model_is_somewhere_and_no_memory_is_exceeded(models, memories):
    rooms = [Room(f"cuda:{n}", memory) for n, memory in enumerate(memories)]
    try:
        placement = place_models(models, rooms)
    except PoolError as error:
        if "no device has room" not in error.message:
            raise
        return
    sizes = {model.name: model.memory_bytes for model in models}
    for assignment, room in zip(placement.assignments, rooms, strict=True):
        assert len(set(assignment.models)) == len(assignment.models)
        assert assignment.memory_bytes == sum(sizes[name] for name in assignment.models)
        assert room.memory_bytes is not None
        assert assignment.memory_bytes <= room.memory_bytes
    assert {name for a in placement.assignments for name in a.models} == set(sizes)
    assert len(placement.reasons) == sum(len(a.models) for a in placement.assignments)


def test_two_models_on_two_devices_take_as_long_as_the_slower():
    models = [ModelLoad("densenet", 30.0, 1), ModelLoad("resnet101", 50.0, 1)]
    placement = place_models(models, [Room("cuda:0", None), Room("cuda:1", None)])
    assert [a.models for a in placement.assignments] == [("resnet101",), ("densenet",)]
    assert placement.makespan_ms == 50.0


def test_devices_that_would_stay_empty_take_copies_of_the_bottleneck():
    models = [ModelLoad("small", 10.0, 1), ModelLoad("large", 90.0, 1)]
    placement = place_models(models, [Room(f"cuda:{n}", None) for n in range(4)])
    assert [a.models for a in placement.assignments] == [("large",), ("small",), ("large",), ("large",)]
    assert placement.makespan_ms == 30.0


def test_one_model_is_on_every_device():
    placement = place_models([ModelLoad("m", 1.0, 1)], [Room(f"cuda:{n}", None) for n in range(3)])
    assert [a.models for a in placement.assignments] == [("m",)] * 3


def test_what_fits_nowhere_is_named():
    with pytest.raises(PoolError, match=r"no device has room for big(?s:.*)cuda:0: 0 MB of 8 MB taken"):
        place_models([ModelLoad("big", 1.0, 9 * 2**20)], [Room("cuda:0", 8 * 2**20)])
