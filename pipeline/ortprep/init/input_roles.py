"""Roles of inputs, by name, type and shape, and the values to feed them: one table. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import GraphFacts
from ortprep.stages.core.spec_fit import INTEGER_RANGES

Scalar = str | int | float | bool
"""One element of a tensor, as a spec writes it."""

Shape = tuple[int | str | None, ...]
"""Axes as a model declares them: a size, a name, or None for neither."""

CHANNELS = (1, 3, 4)
"""Sizes of an axis that holds the channels of an image."""

_LETTERS = {
    **dict.fromkeys(("float16", "float32", "float64", "bfloat16"), "f"),
    **dict.fromkeys(("uint8", "int8"), "n"),
    "int16": "h",
    "bool": "b",
    "string": "s",
}
MAX_SEARCHED = 200
"""Characters of a name that are searched: the time of some expressions grows with the square of a name."""

_MIN_SIGNAL_SIZE = 256  # a shorter fixed axis holds features, not samples


@dataclass(frozen=True)
class Values:
    """Values of one input; at most one of `range`, `values` and `size`.

    Attributes:
        reason: Reason for them, in one line.
        range: Lowest and highest value, both included.
        values: The only values. Without any of the three, the build chooses.
        size: A size of the inputs that is the only value: `length`, `height` or `past`.
    """

    reason: str
    range: tuple[float, float] | None = None
    values: tuple[Scalar, ...] | None = None
    size: str = ""


class InputRole(NamedTuple):
    """One kind of input, and how it is recognised.

    Attributes:
        name: Name of the role.
        types: Letters of its element types: `f` for floats, `h` for int16, `n` for integers of 8 bits,
            `i` for others, `b` for bool, `s` for strings.
        names: Regular expression that is found in its name.
        ranks: Smallest and largest number of axes.
        axes: Roles of the first, the middle and the last axis where they are open.
        test: Further condition on its name and its shape.
    """

    name: str
    types: str
    names: str
    ranks: tuple[int, int]
    axes: tuple[str, str, str]
    test: Callable[[str, Shape], bool] = lambda _name, _shape: True


def _is_image(name: str, shape: Shape) -> bool:
    is_named = re.search(r"image|img|pixel|photo|frame|picture|face|data_0", name) is not None
    if len(shape) == 3:
        return is_named and 3 in (shape[0], shape[-1])
    return is_named or any(axis in CHANNELS for axis in shape[1:]) or int not in map(type, shape[1:])


def _is_signal(name: str, shape: Shape) -> bool:
    last = shape[-1]
    is_named = re.search(r"audio|wav|speech|pcm|samples|signal|sound", name) is not None
    is_long = not isinstance(last, int) or last >= _MIN_SIGNAL_SIZE
    # Rows of any length; of features, the model would know how many there are.
    is_open = last is None or (isinstance(last, str) and re.search(r"samples|time|frame|seq|len", last))
    has_few_channels = len(shape) < 3 or bool({1, 2} & set(shape[1:]))
    return has_few_channels and ((is_open and len(shape) > 1) or (is_named and is_long))


_ANY = (0, 64)
_BATCH = ("batch", "batch", "batch")
_TEXT = ("batch", "sequence", "sequence")
_SIGNAL = ("batch", "other", "samples")
_IMAGE = ("batch", "channels", "channels")  # what the others are depends on where the channels are
_IMAGE_SIZE = r"im(age|g)?_?(shape|size)|orig.*size|target_size|origin_shape"
_LENGTHS = r"(^|_)(len|lens|length|lengths)$|_len_|n_frames|num_frames|seq_len"
_STATE = r"past|cache|state|hidden|memory|^(h|c|hn|cn)_?[0-9]*$|^(in_)?[hc]0$|context$|buffer|_rnn|_conv$"

ROLES: tuple[InputRole, ...] = (
    InputRole("text", "s", "", _ANY, _TEXT),
    InputRole("rate", "fhni", r"(^|_)(sr|fs)$|sampl(e|ing)_?rate", (0, 2), _BATCH),
    InputRole("image size", "fhni", _IMAGE_SIZE, (0, 2), _BATCH),
    InputRole("padding", "b", "mask.*pad|pad.*mask", _ANY, _TEXT),
    InputRole("mask", "fhnib", "mask", _ANY, ("batch", "other", "sequence")),
    InputRole("lengths", "hni", _LENGTHS, (0, 1), _BATCH),
    InputRole("state", "fhni", r"past|cache", (4, 4), ("batch", "past", "other")),
    InputRole("state", "f", _STATE, (1, 64), _BATCH),
    InputRole("positions", "hni", r"position_ids?|pos_ids?|cache_position", _ANY, _TEXT),
    InputRole("threshold", "f", r"threshold|iou|conf$", (0, 2), _BATCH),
    InputRole("scale", "fhni", r"scale|speed|temperature|alpha|factor|guidance", (0, 2), _BATCH),
    InputRole("switch", "fhnib", r"use_cache|branch|flag|train", (0, 1), _BATCH),
    InputRole("switch", "b", "", _ANY, _TEXT),
    InputRole("8-bit image", "n", "", (3, 5), _IMAGE),
    InputRole("image", "f", "", (3, 5), _IMAGE, _is_image),
    InputRole("audio", "f", "", (1, 3), _SIGNAL, _is_signal),
    InputRole("16-bit audio", "h", "", (1, 3), _SIGNAL, _is_signal),
    InputRole("features", "f", "", _ANY, ("batch", "frames", "frames")),
    InputRole("ids", "hi", r"ids?$|tokens?|text|phone|^x$|input|sids?$|speaker|lang", (2, 2), _TEXT),
    InputRole("other", "fhnibs", "", _ANY, _TEXT),
)
"""Kinds of inputs; the first that fits counts."""

_VALUES: Mapping[str, tuple[Values, ...]] = {
    "text": (Values("the graph does not list its words", values=("a",)),),
    "rate": (Values("a common sample rate, in Hz", values=(16_000,)),),
    "image size": (Values("the size of the image", size="height"),),
    "padding": (Values("no padding", values=(False,)), Values("all padding", values=(True,))),
    "mask": (
        Values("a mask that keeps every position", values=(1,)),
        Values("an additive mask of zeros", values=(0,)),
    ),
    "lengths": (Values("the whole sequence", size="length"),),
    "state": (
        Values("an initial state of zeros", values=(0,)),
        Values("a state with any values", range=(-1, 1)),
    ),
    "positions": (Values("the position after the past ones", size="past"),),
    "threshold": (Values("a threshold in the middle", values=(0.5,)),),
    "scale": (
        Values("a scale that changes nothing", values=(1,)),
        Values("a scale of zero", values=(0,)),
    ),
    "switch": (
        Values("a switch that is on", values=(True,)),
        Values("a switch that is off", values=(False,)),
    ),
    "image": (
        Values("pixels, scaled; if yours are normalised, give their range", range=(0, 1)),
        Values("pixels, not scaled", range=(0, 255)),
    ),
    "8-bit image": (Values("8-bit pixels", range=(-128, 255)),),
    "audio": (Values("audio samples, at full scale", range=(-1, 1)),),
    "16-bit audio": (Values("16-bit audio samples", range=(-32768, 32767)),),
    "ids": (Values("ids of a small vocabulary; the graph does not say how large it is", range=(0, 100)),),
}
"""What to feed each kind of input, the preferred first; ranges are cut to the type's."""

_NO_HINT = "the graph gives no hint"
_USUAL: Mapping[str, tuple[Values, ...]] = {
    "f": (
        Values(f"features; {_NO_HINT}", range=(-1, 1)),
        Values(f"features; {_NO_HINT}", range=(0, 1)),
        Values(_NO_HINT, values=(1,)),
    ),
    "n": (Values("any value of the type"),),
    "i": (
        Values(_NO_HINT, range=(0, 1)),
        Values(_NO_HINT, values=(1,)),
        Values(_NO_HINT, values=(0,)),
        Values("the whole sequence", size="length"),
    ),
}
"""What to feed any input in the end, by the letter of its type."""


def declared_shape(item: TensorSpec) -> Shape:
    """Returns the shape of an input; a batch of rows for one that declares none."""
    return (None, None) if item.shape is None else item.shape


def find_role(item: TensorSpec) -> InputRole:
    """Returns what an input is."""
    name, shape = item.name[:MAX_SEARCHED].lower(), declared_shape(item)
    letter = _LETTERS.get(item.dtype, "i")
    return next(
        role
        for role in ROLES
        if letter in role.types
        and role.ranks[0] <= len(shape) <= role.ranks[1]
        and re.search(role.names, name)
        and role.test(name, shape)
    )


def propose_values(item: TensorSpec, facts: GraphFacts) -> tuple[Values, ...]:
    """Returns what may be fed to an input, the preferred proposal first; `resolve` fits them to its type."""
    role, letter, bound = find_role(item), _LETTERS.get(item.dtype, "i"), facts.bound(item.name)
    found = [] if bound is not None and role.name == "ids" else list(_VALUES.get(role.name, ()))
    if role.name == "image" and item.name in facts.highest:
        found.insert(0, Values("pixels; the graph scales them itself", range=(0, facts.highest[item.name])))
    if bound is not None and letter in "hni":
        found.append(Values(f"rows of a table of {bound} in the graph", range=(0, bound - 1)))
        found.append(Values(f"the first row of a table of {bound} in the graph", values=(0,)))
    return (*found, *_USUAL.get(letter.replace("h", "i"), ()))


def resolve(proposal: Values, dtype: str, sizes: Mapping[str, int]) -> Values | None:
    """Returns a proposal in an input's type: sizes as numbers, `true` for bool, integers for integers.

    A range is cut to the type's; None for values outside it, and for a size that no input has.
    """
    if proposal.size:
        size = sizes.get(proposal.size)
        return resolve(Values(proposal.reason, values=(size,)), dtype, sizes) if size else None
    if dtype == "string" or _LETTERS.get(dtype) == "f":
        return proposal
    lowest, highest = INTEGER_RANGES.get(dtype, (-math.inf, math.inf))
    if proposal.range is not None:
        low, high = proposal.range
        return Values(proposal.reason, range=(max(math.ceil(low), lowest), min(math.floor(high), highest)))
    kind = bool if dtype == "bool" else int
    if proposal.values is None:
        return proposal
    values = tuple(kind(one) for one in proposal.values)
    return Values(proposal.reason, values=values) if lowest <= min(values) <= max(values) <= highest else None
