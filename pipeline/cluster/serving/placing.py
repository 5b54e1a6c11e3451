"""Which model goes to which device of a cluster, at the start and when nodes come and go. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.errors import PoolError
from pipeline.runtime.pool.placement import ModelLoad, Room, place_models


def place_joining(
    loads: Sequence[ModelLoad], rooms: Sequence[Room], copies: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Returns the models of devices that join a pool, one tuple for each.

    Models that nobody serves come first, as if the devices were a pool of their own. What is empty then takes
    a further copy of the model whose copies have most to do.

    Args:
        loads: What each model asks for on these devices.
        rooms: The devices.
        copies: How many devices serve each model already.

    Raises:
        PoolError: A model that nobody serves fits nowhere.
    """
    absent = [load for load in loads if not copies.get(load.name)]
    placed: list[tuple[str, ...]] = [() for _ in rooms]
    if absent:
        placement = place_models(absent, rooms)
        placed = [assignment.models for assignment in placement.assignments]
    serving = {load.name: copies.get(load.name, 0) for load in loads}
    for models in placed:
        for name in models:
            serving[name] += 1
    for position, room in enumerate(rooms):
        limit = room.memory_bytes
        fitting = [load for load in loads if limit is None or load.memory_bytes <= limit]
        if placed[position] or not fitting:
            continue
        busiest = max(fitting, key=lambda load: (load.cost_ms / max(1, serving[load.name]), load.name))
        placed[position] = (busiest.name,)
        serving[busiest.name] += 1
    return tuple(placed)


def choose_heir(load: ModelLoad, taken: Mapping[int, Sequence[ModelLoad]], rooms: Mapping[int, Room]) -> int:
    """Returns the worker that takes over a model whose last worker is gone: the one with least to do.

    Args:
        load: What the model asks for.
        taken: What the models of each worker ask for, by its number.
        rooms: What each worker's device has.

    Raises:
        PoolError: No worker has room for it.
    """

    def has_room(number: int) -> bool:
        limit = rooms[number].memory_bytes
        return limit is None or sum(one.memory_bytes for one in (*taken[number], load)) <= limit

    fitting = [number for number in taken if has_room(number)]
    if not fitting:
        raise PoolError(
            f"no worker is left for {load.name}\n  expected {load.memory_bytes >> 20} MB free on one of "
            f"{len(taken)}",
            hint="ray status",
        )
    return min(fitting, key=lambda number: (sum(one.cost_ms for one in taken[number]), number))
