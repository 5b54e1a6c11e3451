"""Looks for inputs that a model runs on: the proposed ones, then what each failure suggests.

Pure but for the `run` it is given. A failure further down the graph is progress: the search goes on from
there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.error_hints import find_index_limit, find_node, suggest_sizes
from ortprep.init.graph_facts import GraphFacts, InputUse
from ortprep.init.ranges import Scalar, ValueContext, ValueProposal, propose_values
from ortprep.init.shapes import OpenSize, ShapePlan, plan_shapes

MAX_ATTEMPTS = 150
MAX_SEARCH_S = 120.0
_WIDE_INTEGERS = ("int32", "int64", "uint32", "uint64", "int16", "uint16")
_MAX_USUAL = 4
_VARYING = ("height", "width", "samples", "frames")
_ALIKE = ("sequence", "frames", "samples", "other", "total")


@dataclass(frozen=True)
class ObservedInput:
    """What is known of an input from elsewhere: an application that was watched, an answer of the user.

    Attributes:
        shapes: Shapes that were sent, the most frequent one first; empty if that is not known. The k-th
            shapes of all inputs belong together.
        range: Lowest and highest value, both included.
        values: The only values.
        reason: Where that is known from, in one line.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    range: tuple[float, float] | None = None
    values: tuple[Scalar, ...] | None = None
    reason: str = "as the application sends it"


@dataclass(frozen=True)
class Choice:
    """What one attempt feeds, as what differs from the preferred proposals.

    Attributes:
        sizes: Open sizes by key.
        values: Number of the proposal of values, by input.
        limits: Exclusive upper bounds that a failure told, by input.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def digest(self) -> tuple[object, ...]:
        """Returns what tells choices apart."""
        return tuple(tuple(sorted(one.items())) for one in (self.sizes, self.values, self.limits))


@dataclass(frozen=True)
class Feed:
    """What one input is fed.

    Attributes:
        shape: The primary shape.
        drawn: Its values.
    """

    shape: tuple[int, ...]
    drawn: ValueProposal


@dataclass(frozen=True)
class RunResult:
    """How one run went.

    Attributes:
        error: What ONNX Runtime said; "" if it ran.
        is_finite: Whether all answers are finite numbers.
        is_repeatable: Whether a second run gave the same answers.
    """

    error: str = ""
    is_finite: bool = True
    is_repeatable: bool = True

    @property
    def is_verifiable(self) -> bool:
        """Whether a build can compare with these answers."""
        return not self.error and self.is_finite and self.is_repeatable


@dataclass(frozen=True)
class Attempt:
    """What was fed in one run, and how it went."""

    choice: Choice
    result: RunResult


Run = Callable[[Mapping[str, Feed]], RunResult]
"""Runs the model on seeded values of these shapes and ranges."""


class InputSearch:
    """Proposals for the inputs of one model, and the search among them."""

    def __init__(self, facts: GraphFacts, observed: Mapping[str, ObservedInput]) -> None:
        known = {name: one.shapes[0] for name, one in observed.items() if one.shapes}
        self._facts = facts
        self._observed = observed
        self._known = known
        self._order = {name: index for index, name in enumerate(facts.nodes) if name}
        self.plan: ShapePlan = plan_shapes(facts, known)
        self.attempts: list[Attempt] = []

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs."""
        return self._facts.inspection.interface.inputs

    @property
    def bounds(self) -> Mapping[str, int]:
        """Exclusive upper bounds of inputs that index a table."""
        return self._facts.inspection.interface.index_bounds

    def feeds(self, choice: Choice) -> dict[str, Feed]:
        """Returns shape and values of every input."""
        shapes = self.plan.settle(choice.sizes)
        context = self._context(choice, shapes)
        return {
            item.name: Feed(shapes[item.name], self._drawn(item, choice, context)) for item in self.inputs
        }

    def find(self, run: Run) -> Attempt:
        """Returns the first attempt that ran, else the one that came furthest."""
        deadline = time.monotonic() + MAX_SEARCH_S
        seen: set[tuple[object, ...]] = set()
        base = self._try(Choice(), run, seen)
        while base.result.error:
            better = self._improve(base, run, seen, deadline)
            if better is None:
                return base
            base = better
        base = self._make_usual(base, run, seen)
        return base if base.result.is_verifiable else self._make_verifiable(base, run, seen, deadline)

    def _try(self, choice: Choice, run: Run, seen: set[tuple[object, ...]]) -> Attempt:
        seen.add(choice.digest())
        self.attempts.append(Attempt(choice, run(self.feeds(choice))))
        return self.attempts[-1]

    def _improve(
        self, base: Attempt, run: Run, seen: set[tuple[object, ...]], deadline: float
    ) -> Attempt | None:
        """Returns an attempt that ran, or came further than `base`; None if there is nothing left to try."""
        for choice in self._moves(base):
            if choice.digest() in seen:
                continue
            if len(self.attempts) >= MAX_ATTEMPTS or time.monotonic() > deadline:
                return None
            attempt = self._try(choice, run, seen)
            if not attempt.result.error or self._progress(attempt) > self._progress(base):
                return attempt
        return None

    def _make_usual(self, base: Attempt, run: Run, seen: set[tuple[object, ...]]) -> Attempt:
        """Returns an attempt that ran with usual sizes near those that a message led to, else `base`."""
        for group in self._groups():
            size, usual = self._size(base.choice, group[0]), group[0].sizes
            is_exact = size in usual or group[0].role not in _VARYING
            near = () if is_exact else sorted(usual, key=lambda one: abs(math.log(max(one, 1) / size)))
            for one in near[:_MAX_USUAL]:
                choice = _with_size(base.choice, group, one)
                if choice.digest() not in seen:
                    attempt = self._try(choice, run, seen)
                    if not attempt.result.error:
                        base = attempt
                        break
        return base

    def _make_verifiable(
        self, base: Attempt, run: Run, seen: set[tuple[object, ...]], deadline: float
    ) -> Attempt:
        """Returns an attempt whose answers are finite and repeatable, else `base`."""
        for choice in self._other_values(base.choice):
            if len(self.attempts) >= MAX_ATTEMPTS or time.monotonic() > deadline:
                break
            if choice.digest() not in seen:
                attempt = self._try(choice, run, seen)
                if attempt.result.is_verifiable:
                    return attempt
        return base

    def _progress(self, attempt: Attempt) -> int:
        return self._order.get(find_node(attempt.result.error) or "", -1)

    def _moves(self, base: Attempt) -> Iterator[Choice]:
        """Yields what to try after a failure, the likeliest first."""
        choice, error = base.choice, base.result.error
        limit = find_index_limit(error)
        if limit is not None:
            yield from self._limited(choice, limit)
        groups = self._groups()
        for group in groups:
            for size in suggest_sizes(error, self._size(choice, group[0])):
                yield _with_size(choice, group, size)
        yield from self._other_values(choice)
        yield from self._equal_sizes(choice)
        for group in groups:
            for size in group[0].sizes:
                yield _with_size(choice, group, size)

    def _limited(self, choice: Choice, limit: int) -> Iterator[Choice]:
        for item in self.inputs:
            if item.dtype in _WIDE_INTEGERS and item.name not in self._observed:
                yield replace(choice, limits={**choice.limits, item.name: limit})

    def _other_values(self, choice: Choice) -> Iterator[Choice]:
        shapes = self.plan.settle(choice.sizes)
        for item in self.inputs:
            count = len(self._proposals(item, self._context(choice, shapes)))
            for number in range(count):
                yield replace(choice, values={**choice.values, item.name: number})

    def _equal_sizes(self, choice: Choice) -> Iterator[Choice]:
        alike = [one for one in self.plan.open if one.role in _ALIKE]
        for one in alike:
            size = self._size(choice, one)
            yield replace(choice, sizes={**choice.sizes, **{other.key: size for other in alike}})

    def _groups(self) -> list[tuple[OpenSize, ...]]:
        """Returns the open sizes that change together: the sides of an image, then each alone."""
        sides = tuple(one for one in self.plan.open if one.role in ("height", "width"))
        others = [one for one in self.plan.open if one not in sides]
        rank = {"other": 1, "batch": 2}
        others.sort(key=lambda one: rank.get(one.role, 0))
        alone = [(one,) for one in sides] if len(sides) > 1 else []
        return [*([sides] if sides else []), *((one,) for one in others), *alone]

    def _size(self, choice: Choice, one: OpenSize) -> int:
        return choice.sizes.get(one.key, one.sizes[0])

    def _context(self, choice: Choice, shapes: Mapping[str, tuple[int, ...]]) -> ValueContext:
        sizes = dict.fromkeys(("height", "width", "past", "samples", "frames", "sequence"), 0)
        for one in self.plan.open:
            if one.role in sizes:
                sizes[one.role] = max(sizes[one.role], self._size(choice, one))
        longest = max((max(shape) for shape in shapes.values() if len(shape) in (2, 3)), default=0)
        length = sizes["samples"] or sizes["frames"] or sizes["sequence"] or longest
        sides = next((_sides(shape) for shape in shapes.values() if len(shape) == 4), (0, 0))
        height, width = sizes["height"] or sides[0], sizes["width"] or sides[1]
        return ValueContext(length, height, width, sizes["past"])

    def _proposals(self, item: TensorSpec, context: ValueContext) -> Sequence[ValueProposal]:
        seen = self._observed.get(item.name)
        if seen is not None and (seen.range is not None or seen.values is not None):
            return (ValueProposal(seen.range, seen.values, seen.reason),)
        use = self._facts.uses.get(item.name, InputUse())
        return propose_values(item, use, self.bounds.get(item.name, use.classes), context)

    def _drawn(self, item: TensorSpec, choice: Choice, context: ValueContext) -> ValueProposal:
        proposals = self._proposals(item, context)
        chosen = proposals[min(choice.values.get(item.name, 0), len(proposals) - 1)]
        limit = choice.limits.get(item.name)
        if limit is None:
            return chosen
        return ValueProposal((0, limit - 1), None, f"rows of a table of {limit}, from ONNX Runtime's message")


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns height and width of a batch of images, whose channels come before them or after."""
    return (shape[1], shape[2]) if shape[3] in (1, 3, 4) else (shape[2], shape[3])


def _with_size(choice: Choice, group: tuple[OpenSize, ...], size: int) -> Choice:
    return replace(choice, sizes={**choice.sizes, **{one.key: size for one in group}})
