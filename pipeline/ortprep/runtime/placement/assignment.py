"""Which model goes to which device: longest processing time first, memory as a constraint.

Graham's rule (Bounds on multiprocessing timing anomalies, 1969) is within 4/3 of the best makespan where
memory binds nobody. Devices that stay empty then get further copies of whatever is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortprep.errors import PoolError


@dataclass(frozen=True)
class ModelLoad:
    """What a model takes of a device.

    Attributes:
        name: Name of the model.
        cost_ms: What one request takes, or any other measure of work, as long as all use the same.
        memory_bytes: What one copy takes on the device.
    """

    name: str
    cost_ms: float
    memory_bytes: int


@dataclass(frozen=True)
class Room:
    """A device as placement sees it.

    Attributes:
        name: Name of the device.
        memory_bytes: What models may take there; None for no limit.
    """

    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Assignment:
    """What a device serves.

    Attributes:
        device: Its name.
        models: Names, in the order they were placed.
        cost_ms: Work per round of one request of every model, copies sharing theirs.
        memory_bytes: What its models take.
    """

    device: str
    models: tuple[str, ...]
    cost_ms: float
    memory_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where every model is, and why.

    Attributes:
        assignments: One per device, in the order they were given.
        makespan_ms: Work of the busiest device: what a round takes at least.
        reasons: A sentence per decision, in order.
    """

    assignments: tuple[Assignment, ...]
    makespan_ms: float
    reasons: tuple[str, ...]


def place_models(models: Sequence[ModelLoad], rooms: Sequence[Room]) -> Placement:
    """Places every model on a device, and on more where devices would stay empty.

    Args:
        models: Names are unique.
        rooms: The devices, of equal speed.

    Raises:
        PoolError: A model fits nowhere beside those placed before it.
    """
    board = _Board(rooms)
    for model in sorted(models, key=lambda model: (-model.cost_ms, -model.memory_bytes, model.name)):
        position = board.lightest(model)
        if position is None:
            raise _no_room(model, board)
        why = ", which was least loaded" if len(rooms) > 1 else ""
        board.put(model, position, f"{model.name} ({_ms(model.cost_ms)}) to {{}}{why}")
    _fill(models, board)
    return board.placement()


def _fill(models: Sequence[ModelLoad], board: _Board) -> None:
    """Puts a further copy of the busiest model that fits on every device that is still empty."""
    for position in board.empty():
        fitting = [model for model in models if board.fits(model, position)]
        if not fitting:
            continue
        model = max(fitting, key=lambda model: (board.share(model), model.name))
        reason = f"another copy of {model.name} ({_ms(board.share(model))} per copy) to {{}}, which was empty"
        board.put(model, position, reason)


class _Board:
    """Devices while models are put on them."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self.rooms = rooms
        self._on: list[list[ModelLoad]] = [[] for _ in rooms]
        self._reasons: list[str] = []

    def empty(self) -> list[int]:
        return [position for position, models in enumerate(self._on) if not models]

    def copies(self, model: ModelLoad) -> int:
        return sum(model in models for models in self._on)

    def share(self, model: ModelLoad) -> float:
        return model.cost_ms / max(1, self.copies(model))

    def cost(self, position: int) -> float:
        return sum(map(self.share, self._on[position]))

    def memory(self, position: int) -> int:
        return sum(model.memory_bytes for model in self._on[position])

    def fits(self, model: ModelLoad, position: int) -> bool:
        limit = self.rooms[position].memory_bytes
        return limit is None or self.memory(position) + model.memory_bytes <= limit

    def lightest(self, model: ModelLoad) -> int | None:
        """Returns the device with least to do that has room, of equals the one with most memory left."""
        fitting = [position for position in range(len(self.rooms)) if self.fits(model, position)]
        return min(fitting, key=lambda at: (self.cost(at), self.memory(at), at), default=None)

    def put(self, model: ModelLoad, position: int, reason: str) -> None:
        self._on[position].append(model)
        self._reasons.append(reason.format(self.rooms[position].name))

    def placement(self) -> Placement:
        assignments = tuple(
            Assignment(room.name, tuple(model.name for model in on), round(self.cost(at), 6), self.memory(at))
            for at, (room, on) in enumerate(zip(self.rooms, self._on, strict=True))
        )
        makespan_ms = max((assignment.cost_ms for assignment in assignments), default=0.0)
        return Placement(assignments, makespan_ms, tuple(self._reasons))


def _no_room(model: ModelLoad, board: _Board) -> PoolError:
    lines = "".join(
        f"\n  {room.name}: {_mb(board.memory(position))} of {_mb(room.memory_bytes or 0)} taken"
        for position, room in enumerate(board.rooms)
    )
    return PoolError(
        f"no device has room for {model.name}\n  expected {_mb(model.memory_bytes)} free{lines}",
        hint="give the pool more devices, or fewer models",
    )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MB"


def _ms(value: float) -> str:
    return f"{value:.3g} ms"
