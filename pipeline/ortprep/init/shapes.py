"""Which shapes to feed a model: a size for every axis that its graph leaves open, with the reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import GraphFacts, InputUse
from ortprep.init.input_kind import InputKind, classify

Role = Literal[
    "batch", "height", "width", "channels", "samples", "frames", "sequence", "past", "total", "other"
]
"""What an open size counts."""

MAX_SIZE = 2**20
"""Largest size that is proposed for one axis."""

_IMAGE = (224, 640, 256, 320, 512, 384, 416, 448, 299, 336, 128, 112, 96, 64, 48, 32, 28, 800, 1024, 518)
_DETECTOR = (640, *(size for size in _IMAGE if size != 640))
_LINE = (320, 160, 192, 640, 128, 256, 100, 64, 32)
_SEQUENCE = (128, 64, 256, 512, 32, 16, 77, 50, 100, 8, 4, 2, 1, 384, 1024)
_FRAMES = (128, 100, 200, 64, 80, 300, 400, 32, 16, 76, 98, 8, 1000, 3000, 1)
_SAMPLES = (
    *(16_000, 512, 1024, 1280, 1536, 576, 32_000, 48_000, 80_000, 160_000, 480_000, 4096, 8000, 24_000),
    *(44_100, 256, 960, 480, 320, 160),
)
_PAST = (16, 8, 32, 1, 0)
_OTHER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CHANNELS = (3, 1, 4, 2)

_SIZES: Mapping[Role, tuple[int, ...]] = {
    "batch": (1, 2),
    "height": _IMAGE,
    "width": _IMAGE,
    "channels": _CHANNELS,
    "samples": _SAMPLES,
    "frames": _FRAMES,
    "sequence": _SEQUENCE,
    "past": _PAST,
    "total": (),
    "other": _OTHER,
}

_WHY: Mapping[Role, str] = {
    "batch": "one request at a time",
    "height": "side of an image",
    "width": "side of an image",
    "channels": "channels of an image",
    "samples": "audio samples",
    "frames": "feature frames",
    "sequence": "sequence positions",
    "past": "past positions",
    "total": "past and new positions together",
    "other": "the graph gives no hint",
}

_SYMBOLS: tuple[tuple[str, Role], ...] = (
    (r"past.*\+|total|kv_?seq|mask_len", "total"),
    (r"past|cache", "past"),
    (r"batch|^b$|^n$|^bs$|examples|^m$", "batch"),
    (r"height|^h$", "height"),
    (r"width|^w$", "width"),
    (r"chan|^c$", "channels"),
    (r"audio|wave|samples", "samples"),
    (r"frame|time|^t$", "frames"),
    (r"seq|len|token|^s$|^l$|step|text|phon|word|char", "sequence"),
)
"""What names of symbolic dimensions mean; the first that fits counts."""

_TERM = re.compile(r"\s*([+-])?\s*(?:(\d+)\s*\*\s*)?([A-Za-z_][\w.]*|\d+)\s*")


@dataclass(frozen=True)
class OpenSize:
    """A size that the graph leaves open.

    Attributes:
        key: Name of the symbolic dimension, or `INPUT[AXIS]` for one without a name.
        role: What it counts.
        sizes: Sizes to try, the preferred one first; at least one.
        reason: Why the first of them is preferred.
    """

    key: str
    role: Role
    sizes: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ShapePlan:
    """The shapes of all inputs, up to the open sizes.

    Attributes:
        axes: A size or the key of an open size per axis, by input.
        open: The open sizes, each once, in order of the inputs.
        sums: Symbolic dimensions that follow from others: (factor, key) terms, "" for the constant 1; each
            after those that its terms name.
    """

    axes: Mapping[str, tuple[int | str, ...]]
    open: tuple[OpenSize, ...]
    sums: Mapping[str, tuple[tuple[int, str], ...]]

    def settle(self, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every input.

        Args:
            chosen: Sizes by key; the preferred one for what is not in it.
        """
        sizes = {one.key: chosen.get(one.key, one.sizes[0]) for one in self.open} | {"": 1}
        for key, terms in self.sums.items():
            sizes[key] = chosen.get(key, max(0, sum(factor * sizes[name] for factor, name in terms)))
        return {
            name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
            for name, axes in self.axes.items()
        }

    def find(self, key: str) -> OpenSize | None:
        """Returns the open size of that key, None for a sum or an unknown key."""
        return next((one for one in self.open if one.key == key), None)


def plan_shapes(facts: GraphFacts, known: Mapping[str, tuple[int, ...]]) -> ShapePlan:
    """Proposes the shapes of all inputs.

    Args:
        facts: What the graph says.
        known: Shapes of some inputs, which settle the symbolic dimensions that these inputs have too.
    """
    inputs = facts.inspection.interface.inputs
    settled = {
        key: size
        for item in inputs
        for key, size in zip(_keys(item, facts), known.get(item.name, ()), strict=False)
        if isinstance(key, str)
    }
    axes: dict[str, tuple[int | str, ...]] = {}
    proposals: dict[str, list[OpenSize]] = {}
    for item in inputs:
        keys = _keys(item, facts)
        axes[item.name] = known.get(item.name, tuple(settled.get(str(key), key) for key in keys))
        for axis, key in enumerate(keys):
            if isinstance(key, str) and key not in settled and item.name not in known:
                proposals.setdefault(key, []).append(_propose(item, axis, key, facts))
    sums = {key: terms for key in proposals if (terms := _terms(key, proposals)) is not None}
    opened = [_most_certain(found) for key, found in proposals.items() if key not in sums]
    if any(one.role == "past" for one in opened):
        opened = [_one_at_a_time(one) for one in opened]
    # Totals come first: a sum may have a total among its terms, never the other way round.
    sums = dict(_settle_totals(opened)) | sums
    return ShapePlan(axes, tuple(one for one in opened if one.key not in sums), sums)


def _keys(item: TensorSpec, facts: GraphFacts) -> tuple[int | str, ...]:
    shape = item.shape
    if shape is None:
        shape = (None,) * _guess_rank(item, facts)
    return tuple(
        axis if isinstance(axis, int) else axis or f"{item.name}[{position}]"
        for position, axis in enumerate(shape)
    )


def _guess_rank(item: TensorSpec, facts: GraphFacts) -> int:
    """Returns a rank for an input that has none: what a neighbour asks for, or a batch of rows."""
    return facts.uses.get(item.name, InputUse()).rank or 2


def _propose(item: TensorSpec, axis: int, key: str, facts: GraphFacts) -> OpenSize:
    use = facts.uses.get(item.name, InputUse())
    if axis in use.sizes and axis != use.batch:
        return OpenSize(key, "channels", (use.sizes[axis],), "the weights require it")
    role = _role(item, axis, key, facts)
    sizes, why = _SIZES[role], _WHY[role]
    if role in ("height", "width"):
        sizes, why = _image_sizes(item, facts)
    return OpenSize(key, role, sizes or _SEQUENCE, why)


def _role(item: TensorSpec, axis: int, key: str, facts: GraphFacts) -> Role:
    use = facts.uses.get(item.name, InputUse())
    kind = classify(item, use, facts.inspection.interface.index_bounds.get(item.name, use.classes))
    named = _role_of_name(key) if key in (item.shape or ()) else None
    if named == "frames" and kind == "audio":
        return "samples"
    if named in ("sequence", "samples") and kind == "audio" and axis > 0:
        return "samples"
    if named is not None:
        return named
    return _role_of_place(item, axis, kind, use)


def _role_of_name(symbol: str) -> Role | None:
    return next((role for pattern, role in _SYMBOLS if re.search(pattern, symbol.lower())), None)


def _role_of_place(item: TensorSpec, axis: int, kind: InputKind, use: InputUse) -> Role:
    rank = len(item.shape) if item.shape is not None else use.rank or 2
    if axis == use.batch:
        return "batch"
    if kind == "image":
        return _image_role(item, axis, rank, use)
    if kind in ("audio", "tokens", "mask") and axis == rank - 1 and (rank > 1 or kind != "mask"):
        return "samples" if kind == "audio" else "sequence"
    if kind == "state":
        return "past" if rank == 4 and axis == 2 else "batch" if rank > 1 else "other"
    if axis == 0:
        return "frames" if use.batch not in (None, 0) else "batch"
    if kind == "features":
        return "frames"
    return "sequence" if axis == 1 and rank <= 3 else "other"


def _image_role(item: TensorSpec, axis: int, rank: int, use: InputUse) -> Role:
    shape = item.shape or (None,) * rank
    last_is_channels = shape[-1] in (1, 3, 4) and shape[-3] not in (1, 3, 4)
    spatial = use.spatial[-2:] or ((rank - 3, rank - 2) if last_is_channels else (rank - 2, rank - 1))
    if axis in spatial:
        return "height" if axis == spatial[0] else "width"
    if rank == 3:
        return "channels"
    if axis == 0:
        return "batch"
    return "frames" if rank == 5 and axis in (1, 2) and shape[3 - axis] in (1, 3, 4) else "channels"


def _image_sizes(item: TensorSpec, facts: GraphFacts) -> tuple[tuple[int, ...], str]:
    fixed = [size for size in item.shape or () if isinstance(size, int) and size > 4]
    if fixed and fixed[-1] <= 64:
        return _LINE, f"a line of text or the like, {fixed[-1]} high"
    if fixed:
        return (fixed[-1], *(size for size in _IMAGE if size != fixed[-1])), "the same as its other side"
    operators = facts.inspection.operators
    if any(name in operators for name in ("Resize", "Upsample", "NonMaxSuppression", "ConvTranspose")):
        return _DETECTOR, "side of an image, as usual for detectors"
    return _IMAGE, "side of an image, as usual for classifiers"


def _most_certain(found: Sequence[OpenSize]) -> OpenSize:
    """Returns the proposal that counts where several inputs share a dimension."""
    exact = [one for one in found if len(one.sizes) == 1]
    telling = [one for one in found if one.role not in ("other", "batch")]
    return next(iter((*exact, *telling, *found)))


def _terms(key: str, proposals: Mapping[str, object]) -> tuple[tuple[int, str], ...] | None:
    """Returns what a dimension called `past + 1` or `2*length` is made of, None if it is no sum of others."""
    terms, position = [], 0
    while position < len(key):
        match = _TERM.match(key, position)
        if match is None or match.end() == position:
            return None
        sign, factor, name = match.groups()
        signed = int(factor or 1) * (-1 if sign == "-" else 1)
        terms.append((signed * int(name), "") if name.isdigit() else (signed, name))
        position = match.end()
    others = {name for _, name in terms if name}
    return tuple(terms) if len(terms) > 1 and others and others <= proposals.keys() - {key} else None


def _settle_totals(opened: Sequence[OpenSize]) -> Iterator[tuple[str, tuple[tuple[int, str], ...]]]:
    """Yields the dimensions that count past and new positions together, as their sum."""
    past = next((one.key for one in opened if one.role == "past"), None)
    new = next((one.key for one in opened if one.role == "sequence"), None)
    for one in opened:
        if one.role == "total" and past is not None and new is not None:
            yield one.key, ((1, past), (1, new))


def _one_at_a_time(one: OpenSize) -> OpenSize:
    """Returns the size of a sequence of which the past is given: its next position."""
    if one.role != "sequence" or "encoder" in one.key.lower():
        return one
    return replace(one, sizes=(1, *(size for size in one.sizes if size != 1)), reason="the next position")
