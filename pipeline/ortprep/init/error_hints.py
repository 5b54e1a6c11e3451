"""Hints in ONNX Runtime's messages: inputs to try next. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from ortprep.init.shapes import MAX_SIZE

_NODE = re.compile(r"Name:\s?'([^']*)'")
_INPUT = re.compile(r"(?:for input|input name|Input name|for input:)[: ]+'?([^\s',]+)'?")
_INDEX = re.compile(r"must be within the inclusive range \[-?\d+, ?(-?\d+)\]")
_LIST = re.compile(r"[{\[(](-?\d+(?:, ?-?\d+)*,?)[}\])]")
_PAIRS = (
    re.compile(r"by a dimension other than 1\. (\d+) by (\d+)"),
    re.compile(r"mismatched dimensions of (\d+) and (\d+)"),
    re.compile(r"[Gg]ot:? ?(\d+).{0,40}?[Ee]xpected:? ?(\d+)"),
    re.compile(r"[Cc]: ?(\d+).{0,20}?kernel channels: ?(\d+)"),
    re.compile(r"W: ?\{(\d+), ?\d+\} K: ?(\d+)"),
    re.compile(r"(\d+) != (\d+)"),
)
_NO_MEMORY = re.compile(r"[Ff]ailed to allocate memory|bad_alloc|MemoryError")
_STRIDES = (16, 32, 64, 128, 256)
_NEARLY = 0.1
_MAX_PAIRS = 8


def find_node(message: str) -> str | None:
    """Returns the name of the node that failed, None if the message names none."""
    found = _NODE.search(message)
    return found[1] if found is not None and found[1] else None


def find_input(message: str, names: tuple[str, ...]) -> str | None:
    """Returns the input that a message names, None if it names none of the model's."""
    found = _INPUT.search(message)
    return found[1] if found is not None and found[1] in names else None


def find_index_limit(message: str) -> int | None:
    """Returns how many rows the table has that an index was outside of, None if that is not what failed."""
    found = _INDEX.search(message)
    return None if found is None or int(found[1]) < 0 else int(found[1]) + 1


def suggest_sizes(message: str, size: int) -> tuple[int, ...]:
    """Returns sizes that may do where `size` did not, the likeliest first.

    Sizes in the message follow from `size` by strides, products or sums; so its ratios and differences are
    applied to `size` itself. What is close points to a size that strides do not divide.
    """
    if _NO_MEMORY.search(message):
        return tuple(one for one in (size // 2, size // 4) if one > 0)
    pairs = tuple(_pairs(message))
    found: list[int] = []
    if any(abs(one - other) <= max(2, _NEARLY * max(one, other)) for one, other in pairs):
        found += _multiples(size)
    for one, other in pairs:
        found += _scaled(size, one, other)
    found += _multiples(size)
    limit = find_index_limit(message)
    if limit is not None:
        # Some tables keep their first one or two rows for what is no position.
        found = [limit, limit - 1, limit - 2, limit // 2, *found]
    return tuple(dict.fromkeys(one for one in found if 0 < one <= MAX_SIZE and one != size))


def _pairs(message: str) -> Iterator[tuple[int, int]]:
    """Yields pairs of sizes that a message says should have been equal."""
    seen: dict[tuple[int, int], None] = {}
    for pattern in _PAIRS:
        for found in pattern.finditer(message):
            seen[int(found[1]), int(found[2])] = None
    lists = [_numbers(found[1]) for found in _LIST.finditer(message)][:4]
    for one, other in pairwise(lists):
        if min(*one, *other) > 0:
            seen[math.prod(one), math.prod(other)] = None
        if len(one) == len(other):
            seen.update(dict.fromkeys(zip(one, other, strict=True)))
        seen[one[-1], other[max(len(other) - 2, 0)]] = None
    if not seen:
        numbers = dict.fromkeys(map(int, re.findall(r"\b\d{1,9}\b", message.partition("Status Message")[2])))
        seen.update(dict.fromkeys(pairwise([one for one in numbers if one > 1])))
    yield from [pair for pair in seen if pair[0] != pair[1] and min(pair) > 0][:_MAX_PAIRS]


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one.strip()]


def _scaled(size: int, one: int, other: int) -> Iterator[int]:
    for low, high in ((one, other), (other, one)):
        for ratio in (high / low, math.sqrt(high / low)):
            yield from _whole(size * ratio)
        if low > 1 and high > 1:
            # One position of a sequence is not of the image: the class of a vision transformer.
            yield from _whole(size * math.sqrt((high - 1) / (low - 1)))
        yield size + high - low
    yield other
    yield one


def _whole(size: float) -> Iterator[int]:
    if abs(size - round(size)) < 1e-6:
        yield round(size)


def _multiples(size: int) -> Iterator[int]:
    for stride in _STRIDES:
        if size % stride:
            yield -(-size // stride) * stride
