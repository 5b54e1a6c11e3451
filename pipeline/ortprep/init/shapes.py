"""Shapes to feed a model: sizes by roles of inputs, and by what ONNX Runtime says of refused ones. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_roles import CHANNELS, MAX_SEARCHED, InputRole, Shape, declared_shape, find_role

MAX_SIZE = 2**20
"""Largest size that is proposed for one axis."""

_IMAGE = (
    *(224, 640, 256, 320, 512, 384, 416, 448, 299, 336, 128, 112, 96, 64, 48, 32, 28, 800, 1024, 518),
    *(160, 192, 240, 288, 300, 80, 120, 380, 480, 260, 600, 608, 768, 72, 62, 1280),
)
_LINE = (320, 160, 192, 640, 128, 256, 100, 64, 32)
_MAX_LINE_HEIGHT = 64
_DETECTOR_OPERATORS = frozenset({"Resize", "Upsample", "NonMaxSuppression", "ConvTranspose"})
_SEQUENCE = (128, 64, 256, 512, 32, 16, 77, 50, 100, 8, 4, 2, 1, 384, 1024)
_FRAMES = (128, 100, 200, 64, 80, 300, 400, 32, 16, 76, 98, 8, 1000, 3000, 1)
_SAMPLES = (
    *(16_000, 512, 1024, 1280, 1536, 576, 32_000, 48_000, 80_000, 160_000, 480_000, 4096, 8000, 24_000),
    *(44_100, 256, 960, 480, 320, 160),
)


class AxisRole(NamedTuple):
    """Role of an open axis.

    Attributes:
        name: Name of the role.
        names: Regular expression that is found in names of such symbolic dimensions.
        sizes: Sizes to try, the preferred first.
        reason: Reason for these sizes.
    """

    name: str
    names: str
    sizes: tuple[int, ...]
    reason: str


AXES: tuple[AxisRole, ...] = (
    AxisRole("total", r"past.*\+|total|kv_?seq|mask_len", _SEQUENCE, "past and new positions together"),
    AxisRole("past", r"past|cache", (16, 8, 32, 1, 0), "past positions"),
    AxisRole("batch", r"batch|^b$|^n$|^bs$|examples|^m$", (1, 2), "one request at a time"),
    AxisRole("height", r"height|^h$", _IMAGE, "side of an image"),
    AxisRole("width", r"width|^w$", _IMAGE, "side of an image"),
    AxisRole("channels", r"chan|^c$", (3, 1, 4, 2), "channels of an image"),
    AxisRole("samples", r"audio|wave|samples", _SAMPLES, "audio samples"),
    AxisRole("frames", r"frame|time|^t$", _FRAMES, "feature frames"),
    AxisRole("sequence", r"seq|len|token|^s$|^l$|step|text|phon|word|char", _SEQUENCE, "sequence positions"),
    AxisRole("other", r"(?!)", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "the graph gives no hint"),
)
"""What names of symbolic dimensions mean; the first that fits counts."""

_MAX_TERMS = 100
"""Characters of a name that are taken apart; what is longer is no sum."""

_TERM = re.compile(r"\s*([+-]?)\s*(?:(\d{1,9})\s*\*\s*)?([A-Za-z_][\w.]*|\d{1,9})\s*")

Terms = tuple[tuple[int, str], ...]
"""A sum of open sizes: a factor and a key each, "" for the constant 1."""


@dataclass(frozen=True)
class ShapePlan:
    """The shapes of all inputs, up to the open sizes.

    Attributes:
        axes: A size or the key of an open size per axis, by input. A key is the name of a symbolic dimension,
            or `INPUT[AXIS]` for one without a name.
        open: Role of each open size, by key, in order of the inputs; at least one size to try.
        sums: Symbolic dimensions that follow from others; each after those that its terms name.
    """

    axes: Mapping[str, tuple[int | str, ...]]
    open: Mapping[str, AxisRole]
    sums: Mapping[str, Terms]

    def settle(self, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every input.

        Args:
            chosen: Sizes by key; the preferred one for what is not in it.
        """
        sizes = {"": 1} | {key: one.sizes[0] for key, one in self.open.items()} | dict(chosen)
        for key, terms in self.sums.items():
            sizes[key] = max(0, sum(factor * sizes[name] for factor, name in terms))
        return {
            name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
            for name, axes in self.axes.items()
        }

    def explain(self, name: str, chosen: Mapping[str, int]) -> str:
        """Returns the reasons of the open sizes of an input, in a line."""
        reasons = []
        for key in self.axes[name]:
            if isinstance(key, str) and key in self.open:
                preferred, reason = self.open[key].sizes[0], self.open[key].reason
                size = chosen.get(key, preferred)
                refused = "" if size == preferred else f", {preferred} did not run"
                reasons.append(f"{size}: {reason}{refused}")
        return "; ".join(dict.fromkeys(reasons))


def plan_shapes(facts: GraphFacts, known: Mapping[str, tuple[int, ...]]) -> ShapePlan:
    """Proposes the shapes of all inputs.

    Args:
        facts: Facts about the graph.
        known: Shapes of some inputs, which settle the symbolic dimensions that these inputs have too.
    """
    inputs = facts.model.interface.inputs
    keys = {item.name: _keys(item) for item in inputs}
    settled = {
        key: size for name, own in keys.items() for key, size in zip(own, known.get(name, ()), strict=False)
    }
    axes: dict[str, tuple[int | str, ...]] = {
        name: tuple(key if isinstance(key, int) else settled.get(key, key) for key in own)
        for name, own in keys.items()
    }
    axes |= {name: shape for name, shape in known.items() if name in axes}
    found: dict[str, list[AxisRole]] = {}
    for item in inputs:
        for axis, key in enumerate(axes[item.name]):
            if isinstance(key, str):
                found.setdefault(key, []).append(_propose(item, axis, key, facts))
    # Where several inputs share a dimension, the first that tells something counts.
    roles = {key: min(own, key=lambda one: one.name in ("other", "batch")) for key, own in found.items()}
    sums = {key: terms for key in roles if (terms := _terms(key, roles.keys() - {key}))}
    first = {role.name: key for key, role in reversed(roles.items()) if key not in sums}
    if "past" in first:
        roles = {key: _one_at_a_time(key, role) for key, role in roles.items()}
    if {"past", "sequence"} <= first.keys():
        total = (1, first["past"]), (1, first["sequence"])
        # Totals come first: a sum may have a total among its terms, never the other way round.
        sums = {key: total for key, role in roles.items() if role.name == "total" and key not in sums} | sums
    return ShapePlan(axes, {key: role for key, role in roles.items() if key not in sums}, sums)


def _keys(item: TensorSpec) -> tuple[int | str, ...]:
    """Returns the declared sizes of an input, and a key for every open one."""
    shape = declared_shape(item)
    return tuple(f"{item.name}[{place}]" if axis is None else axis for place, axis in enumerate(shape))


def _propose(item: TensorSpec, axis: int, key: str, facts: GraphFacts) -> AxisRole:
    """Returns what an open axis counts: by its name, else by its place."""
    kind, shape = find_role(item), declared_shape(item)
    text = key[:MAX_SEARCHED].lower() if key in shape else ""
    name = next((one.name for one in AXES if text and re.search(one.names, text)), None)
    is_letter = name == "batch" and axis > 0 and len(text) == 1  # `N` counts what its place says
    if name is None or is_letter:
        name = _role_of_place(kind, axis, shape)
    elif name in ("frames", "sequence") and kind.name.endswith("audio"):
        name = "samples"
    role = next(one for one in AXES if one.name == name)
    return _image_side(role, shape, facts) if name in ("height", "width") else role


def _role_of_place(kind: InputRole, axis: int, shape: Shape) -> str:
    rank = len(shape)
    if kind.name.endswith("image") and axis >= rank - 3:
        is_last = shape[-1] in CHANNELS and shape[-3] not in CHANNELS
        names = ("height", "width", "channels") if is_last else ("channels", "height", "width")
        return names[axis - rank + 3]
    first, middle, last = kind.axes
    return last if axis == rank - 1 else first if axis == 0 else middle


def _image_side(role: AxisRole, shape: Shape, facts: GraphFacts) -> AxisRole:
    """Returns the sizes of an open side of an image: as its other side, as a line of text, or usual ones."""
    fixed = next((size for size in reversed(shape) if isinstance(size, int) and size > max(CHANNELS)), None)
    if fixed is not None and fixed <= _MAX_LINE_HEIGHT:
        return role._replace(sizes=_LINE, reason=f"a line of text or the like, {fixed} high")
    preferred, reason = fixed or _IMAGE[0], "the same as its other side"
    if fixed is None:
        is_detector = bool(_DETECTOR_OPERATORS & facts.model.operators.keys())
        preferred = 640 if is_detector else preferred
        reason = f"side of an image, as usual for {'detectors' if is_detector else 'classifiers'}"
    return role._replace(sizes=tuple(dict.fromkeys((preferred, *_IMAGE))), reason=reason)


def _terms(key: str, others: set[str]) -> Terms:
    """Returns what a dimension called `past + 1` or `2*length` is made of; () if it is no sum of others."""
    matches = list(_TERM.finditer(key[:_MAX_TERMS]))
    is_sum = "".join(match[0] for match in matches) == key and all(match[1] for match in matches[1:])
    terms = []
    for sign, factor, name in (match.groups() for match in matches):
        count = int(f"{sign}{factor or 1}")
        terms.append((count * int(name), "") if name.isdigit() else (count, name))
    names = {name for _, name in terms if name}
    return tuple(terms) if is_sum and names and names <= others else ()


def _one_at_a_time(key: str, role: AxisRole) -> AxisRole:
    """Returns the size of a sequence of which the past is given: its next position."""
    if role.name != "sequence" or "encoder" in key.lower():
        return role
    return role._replace(sizes=tuple(dict.fromkeys((1, *role.sizes))), reason="the next position")


_NODE = re.compile(r"Name:\s?'([^']*)'")
_INDEX = re.compile(r"must be within the inclusive range \[-?\d+, ?(-?\d+)\]")
_MAX_NUMBERS = 16
_NO_MEMORY = re.compile(r"[Ff]ailed to allocate memory|bad_alloc|MemoryError")


def find_node(message: str) -> str | None:
    """Returns the name of the node that failed, None if the message names none."""
    found = _NODE.search(message)
    return found[1] if found is not None and found[1] else None


def find_index_limit(message: str) -> int | None:
    """Returns how many rows the table has that an index was outside of, None if that is not what failed."""
    found = _INDEX.search(message)
    return None if found is None or int(found[1]) < 0 else int(found[1]) + 1


def suggest_sizes(message: str, size: int, usual: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes that may do where `size` did not, the likeliest first.

    A message's own numbers come last: what they count is not known, and they lead to any size that runs,
    which is seldom one that the model was made for.
    """
    if _NO_MEMORY.search(message):
        return tuple(one for one in (size // 2, size // 4) if one > 0)
    limit = find_index_limit(message)
    # Some tables keep their first one or two rows for what is no position.
    rows = () if limit is None else (limit, limit - 1, limit - 2, limit // 2)
    said = map(int, re.findall(r"\b\d{1,9}\b", message.partition("Status Message")[2])[:_MAX_NUMBERS])
    return tuple(dict.fromkeys(one for one in (*rows, *usual, *said) if 0 < one <= MAX_SIZE and one != size))
