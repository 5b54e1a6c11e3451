"""Looks for inputs that a model runs on: the proposed ones, then what each failure suggests.

Pure but for the `run` it is given. A failure further down the graph is progress: the search goes on
from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_roles import CHANNELS, Scalar, Values, propose_values, resolve
from ortprep.init.shapes import find_index_limit, find_node, plan_shapes, suggest_sizes

MAX_ATTEMPTS = 150
MAX_SEARCH_S = 120.0
_WIDE_INTEGERS = ("int32", "int64", "uint32", "uint64", "int16", "uint16")
_SIDES = ("height", "width")


@dataclass(frozen=True)
class ObservedInput:
    """Knowledge of an input from elsewhere: an application that was watched, an answer of the user.

    Attributes:
        shapes: Shapes that were sent, the most frequent one first; empty if that is not known. The k-th
            shapes of all inputs belong together.
        range: Lowest and highest value, both included.
        values: The only values.
        reason: Source of that knowledge, in one line.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    range: tuple[float, float] | None = None
    values: tuple[Scalar, ...] | None = None
    reason: str = "as the application sends it"


@dataclass(frozen=True)
class Feed:
    """Shapes and values for one input.

    Attributes:
        shapes: Its shapes, the primary one first; the others are not tried here.
        reason: Reason for these shapes.
        values: Values to draw, or their range.
    """

    shapes: tuple[tuple[int, ...], ...]
    reason: str
    values: Values

    @property
    def shape(self) -> tuple[int, ...]:
        """The primary shape."""
        return self.shapes[0]


@dataclass(frozen=True)
class InputAttempt:
    """One run: what was fed, and how it went.

    Attributes:
        sizes: Open sizes that differ from the preferred ones, by key.
        values: Values that differ from the preferred ones, by input.
        feeds: Shapes and values of every input.
        error: Message of ONNX Runtime; "" if it ran.
    """

    sizes: Mapping[str, int]
    values: Mapping[str, Values]
    feeds: Mapping[str, Feed]
    error: str


Run = Callable[[Mapping[str, Feed]], str]
"""Runs the model on seeded values of these shapes and ranges; returns an attempt's `error`."""

Choice = tuple[Mapping[str, int], Mapping[str, Values]]
"""Sizes and values that differ from the preferred ones."""


class InputSearch:
    """The search among what is proposed for the inputs of one model.

    Attributes:
        attempts: Every run so far.
    """

    def __init__(self, facts: GraphFacts, observed: Mapping[str, ObservedInput], run: Run) -> None:
        self._observed = observed
        self._run = run
        self._inputs = facts.model.interface.inputs
        self._nodes = {name: index for index, name in enumerate(facts.nodes) if name}
        self._beyond = len(facts.nodes)
        self._plan = plan_shapes(facts, {name: one.shapes[0] for name, one in observed.items() if one.shapes})
        self._values = {item.name: propose_values(item, facts) for item in self._inputs}
        for name, one in observed.items():
            if one.range is not None or one.values is not None:
                self._values[name] = (Values(one.reason, one.range, one.values),)
        self._deadline = time.monotonic() + MAX_SEARCH_S
        self.attempts: list[InputAttempt] = []

    def find(self) -> InputAttempt:
        """Returns the first attempt that ran, else the one that came furthest."""
        best = self._first([({}, {})], -1)
        assert best is not None  # the first is always in time
        while (reached := self._progress(best)) < self._beyond:
            better = self._first(self._moves(best), reached + 1)
            if better is None:
                return best
            best = better
        return best

    def _first(self, choices: Iterable[Choice], progress: int) -> InputAttempt | None:
        """Runs what differs from all before until one comes that far; None if none does in time."""
        tried = [one.feeds for one in self.attempts]
        for sizes, values in choices:
            feeds = self._feeds(sizes, values)
            if feeds in tried:
                continue
            if len(self.attempts) >= MAX_ATTEMPTS or time.monotonic() > self._deadline:
                return None
            tried.append(feeds)
            attempt = InputAttempt(sizes, values, feeds, self._run(feeds))
            self.attempts.append(attempt)
            if self._progress(attempt) >= progress:
                return attempt
        return None

    def _progress(self, attempt: InputAttempt) -> int:
        """Returns which node failed, -1 if that is not known; beyond the last if the model ran."""
        return self._nodes.get(find_node(attempt.error) or "", -1) if attempt.error else self._beyond

    def _feeds(self, sizes: Mapping[str, int], values: Mapping[str, Values]) -> dict[str, Feed]:
        """Returns shapes and values of every input, given what differs from the preferred ones."""
        shapes = self._plan.settle(sizes)
        known_sizes = self._known_sizes(sizes, shapes)
        feeds = {}
        for item in self._inputs:
            name = item.name
            proposed = (*([values[name]] if name in values else []), *self._values[name])
            found = (resolve(one, item.dtype, known_sizes) for one in proposed)
            drawn = next((one for one in found if one is not None), proposed[0])
            seen = self._observed.get(name)
            if seen is not None and seen.shapes:
                feeds[name] = Feed(seen.shapes, seen.reason, drawn)
            else:
                feeds[name] = Feed((shapes[name],), self._plan.explain(name, sizes), drawn)
        return feeds

    def _moves(self, base: InputAttempt) -> Iterator[Choice]:
        """Yields what to try after a failure, the likeliest first."""
        error = base.error
        limit = find_index_limit(error)
        for item in self._inputs:
            if limit is not None and item.dtype in _WIDE_INTEGERS and item.name not in self._observed:
                reason = f"rows of a table of {limit}, from ONNX Runtime's message"
                yield base.sizes, {**base.values, item.name: Values(reason, range=(0, limit - 1))}
        for group in self._groups():
            role = self._plan.open[group[0]]
            for size in suggest_sizes(error, base.sizes.get(group[0], role.sizes[0]), role.sizes):
                sizes = {**base.sizes, **dict.fromkeys(group, size)}
                yield sizes, base.values
        for name, proposed in self._values.items():
            for one in proposed:
                yield base.sizes, {**base.values, name: one}

    def _groups(self) -> list[list[str]]:
        """Returns the open sizes that change together: the sides of an image, then each alone."""
        rank = {"height": 3, "width": 3, "batch": 2, "other": 1}
        keys = sorted(self._plan.open, key=lambda key: rank.get(self._plan.open[key].name, 0))
        sides = [key for key in keys if self._plan.open[key].name in _SIDES]
        return [*([sides] if len(sides) > 1 else []), *([key] for key in keys)]

    def _known_sizes(self, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the sizes that values depend on, 0 for those that no input has."""
        found: dict[str, int] = {}
        for key, role in self._plan.open.items():
            found[role.name] = max(found.get(role.name, 0), sizes.get(key, role.sizes[0]))
        longest = max((max(shape) for shape in shapes.values() if len(shape) in (2, 3)), default=0)
        lengths = (found.get(role, 0) for role in ("samples", "frames", "sequence"))
        images = [shape for shape in shapes.values() if len(shape) == 4]
        height = next((shape[1] if shape[3] in CHANNELS else shape[2] for shape in images), 0)
        return {
            "length": next(filter(None, lengths), longest),
            "height": found.get("height", height),
            "past": found.get("past", 0),
        }
