"""How an application uses each of its models: the records of all its processes, merged. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ortprep.init import ObservedInput
from ortprep.runtime.dropin.observation import (
    MAX_SMALL_SIZE,
    MAX_VALUES,
    FeedRecord,
    InputRecord,
    ModelRecord,
    Value,
)

MAX_SHAPES = 4
"""Maximum number of sets of shapes in a spec: every one is verified, tuned and measured."""

Limits = tuple[int | float, int | float]


@dataclass(frozen=True)
class ModelUse:
    """How an application uses one model.

    Attributes:
        model: The sessions whose options count: those with the most runs.
        loads: Number of sessions.
        runs: Number of runs of all sessions.
        shapes: Number of different sets of shapes that were told apart.
        other_runs: Number of runs with other shapes than those.
        inputs: What is fed, by input name; empty if no session ran.
        weights: Number of runs of each set of shapes in `inputs`.
        excluded_shapes: Number of sets of shapes not in `inputs` since small inputs had other values there.
        other_options: Number of further sets of options that sessions of this model had.
    """

    model: ModelRecord
    loads: int
    runs: int
    shapes: int
    other_runs: int
    inputs: Mapping[str, ObservedInput]
    weights: tuple[int, ...]
    excluded_shapes: int
    other_options: int

    @property
    def shape_count(self) -> str:
        """Number of different sets of shapes, as far as it is known: `64 or more`."""
        return f"{self.shapes} or more" if self.other_runs else str(self.shapes)

    @property
    def runs_per_load(self) -> int:
        """Runs of one session, at least 1."""
        return max(1, round(self.runs / self.loads))


def merge_uses(models: Sequence[ModelRecord], *, ids: Collection[str] = ()) -> ModelUse:
    """Returns how one model is used.

    Args:
        models: All that was observed of it; at least one.
        ids: Names of inputs that index a table: their values do not depend on shapes.
    """
    main = max(models, key=lambda record: (record.runs, record.loads))
    feeds = _merge_feeds(feed for record in models for feed in record.feeds)
    chosen, excluded_shapes = _choose_feeds(feeds, ids)
    return ModelUse(
        model=main,
        loads=sum(record.loads for record in models),
        runs=sum(record.runs for record in models),
        shapes=len(feeds),
        other_runs=sum(record.runs for record in models) - sum(feed.runs for feed in feeds),
        inputs=_describe_inputs(chosen, feeds, [record.other_limits for record in models], ids),
        weights=tuple(feed.runs for feed in chosen),
        excluded_shapes=excluded_shapes,
        other_options=len({repr(_options_of(record)) for record in models}) - 1,
    )


def _options_of(model: ModelRecord) -> tuple[object, ...]:
    return model.options, model.providers, model.obtained, model.obstacle


def _merge_feeds(feeds: Iterable[FeedRecord]) -> list[FeedRecord]:
    """Returns the runs by shapes, the most frequent first."""
    merged: dict[tuple[tuple[str, tuple[int, ...]], ...], FeedRecord] = {}
    for feed in feeds:
        key = tuple(sorted((name, array.shape) for name, array in feed.inputs.items()))
        earlier = merged.get(key)
        merged[key] = feed if earlier is None else _join(earlier, feed)
    return sorted(merged.values(), key=lambda feed: -feed.runs)


def _join(first: FeedRecord, second: FeedRecord) -> FeedRecord:
    pairs = ((name, first.inputs[name], second.inputs[name]) for name in first.inputs)
    return FeedRecord(first.runs + second.runs, {name: _join_input(a, b) for name, a, b in pairs})


def _join_input(first: InputRecord, second: InputRecord) -> InputRecord:
    low, high = _limits((first, second)) or (None, None)
    values = tuple(dict.fromkeys((*first.values, *second.values)))
    return InputRecord(first.shape, low, high, values if first.values and second.values else ())


def _limits(inputs: Iterable[InputRecord]) -> Limits | None:
    ends = [end for array in inputs for end in (array.minimum, array.maximum) if end is not None]
    return (min(ends), max(ends)) if ends else None


def _choose_feeds(feeds: Sequence[FeedRecord], ids: Collection[str]) -> tuple[list[FeedRecord], int]:
    """Returns the sets of shapes for a spec, and the number of those that do not suit them.

    The spec gets the most frequent ones, and in any case the largest.

    A spec has one set of values per input, for all its shapes. So a set of shapes joins only if every input
    with few values, a length or a sample rate, was seen there with a value of those before.
    """
    described = [feed for feed in feeds if feed.inputs] or feeds
    fitting = [feed for feed in described if feed.inputs.keys() == described[0].inputs.keys()]
    frequent = fitting[: MAX_SHAPES - 1]
    rest = sorted(fitting[MAX_SHAPES - 1 :], key=_elements, reverse=True)
    chosen: list[FeedRecord] = []
    excluded = 0
    for feed in (*frequent, *rest):
        together = [*chosen, feed]
        if all(_common_values(together, name) is not None for name in feed.inputs if name not in ids):
            chosen = together
        else:
            excluded += 1
        if len(chosen) == MAX_SHAPES:
            break
    return chosen, excluded


def _elements(feed: FeedRecord) -> int:
    return sum(math.prod(array.shape) for array in feed.inputs.values())


def _common_values(feeds: Sequence[FeedRecord], name: str) -> tuple[Value, ...] | None:
    """Returns the values of an input in every set of shapes; () if they are many, None if none is common."""
    values = [feed.inputs[name].values for feed in feeds]
    if not all(values):
        return ()
    common = tuple(value for value in values[0] if all(value in others for others in values))
    # What a number with a fraction may be seldom depends on a shape.
    return common or (() if isinstance(values[0][0], float) else None)


def _all_values(inputs: Sequence[InputRecord]) -> tuple[Value, ...]:
    """Returns the values of an input under any shape; () if they are many."""
    values = tuple(sorted({value for array in inputs for value in array.values}))
    return values if all(array.values for array in inputs) and len(values) <= MAX_VALUES else ()


def _describe_inputs(
    chosen: Sequence[FeedRecord],
    every: Sequence[FeedRecord],
    others: Sequence[Mapping[str, Limits]],
    ids: Collection[str],
) -> dict[str, ObservedInput]:
    described = {}
    for name in chosen[0].inputs if chosen else ():
        here = [feed.inputs[name] for feed in chosen]
        seen = [feed.inputs[name] for feed in every if name in feed.inputs]
        seen += [InputRecord((), *limits[name]) for limits in others if name in limits]
        values = _all_values(seen) if name in ids else _common_values(chosen, name)
        shared = None if name in ids else _shared_limits(here)
        limits = None if values else shared or _limits(seen)
        described[name] = ObservedInput(tuple(array.shape for array in here), limits, values or None)
    return described


def _shared_limits(inputs: Sequence[InputRecord]) -> tuple[int, int] | None:
    """Returns the limits that small arrays of integers keep under all shapes: lengths depend on the shape."""
    low, high = [], []
    for array in inputs:
        is_small = math.prod(array.shape) <= MAX_SMALL_SIZE
        if not is_small or not isinstance(array.minimum, int) or not isinstance(array.maximum, int):
            return None
        low.append(array.minimum)
        high.append(array.maximum)
    return (max(low), min(high)) if max(low) <= min(high) else None
