"""Which values to feed an input, with the reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import InputUse
from ortprep.init.input_kind import InputKind, classify
from ortprep.stages.core.inputs.agreement import INTEGER_RANGES

Scalar = str | int | float | bool
"""One element of a tensor, as a spec writes it."""

_SAMPLE_RATE = 16_000
_FLOATS = ("float16", "float32", "float64", "bfloat16")


@dataclass(frozen=True)
class ValueProposal:
    """Values of one input; at most one of `range` and `values`.

    Attributes:
        range: Lowest and highest value, both included; None with `values`.
        values: The only values; None with a range. None for both leaves it to the build.
        reason: Why, in one line.
    """

    range: tuple[float, float] | None
    values: tuple[Scalar, ...] | None
    reason: str


@dataclass(frozen=True)
class ValueContext:
    """Sizes of the inputs that values depend on.

    Attributes:
        length: The longest sequence among the inputs; 0 for none.
        height: Of an image, 0 for none.
        width: Of an image, 0 for none.
        past: Positions that were computed before.
    """

    length: int = 0
    height: int = 0
    width: int = 0
    past: int = 0


def propose_values(
    item: TensorSpec, use: InputUse, bound: int | None, context: ValueContext
) -> tuple[ValueProposal, ...]:
    """Returns what may be fed to an input, the preferred proposal first; at least one.

    Args:
        item: Its name, type and shape.
        use: How the graph uses it.
        bound: Rows of the table that it indexes, None if it indexes none of known size.
        context: Sizes of this and the other inputs.
    """
    kind = classify(item, use, bound)
    proposals = tuple(_propose(kind, item, use, bound, context))
    typed = (_of_type(one, item.dtype) for one in proposals)
    return tuple(dict.fromkeys(one for one in typed if one is not None))


def _propose(
    kind: InputKind, item: TensorSpec, use: InputUse, bound: int | None, context: ValueContext
) -> Iterator[ValueProposal]:
    if kind == "text":
        words = use.words or ("a",)
        why = "words that the graph knows" if use.words else "the graph does not list its words"
        yield ValueProposal(None, words, why)
    elif kind == "mask":
        yield from _propose_mask(item)
    elif kind == "flag" or item.dtype == "bool":
        yield ValueProposal(None, (True,), "a switch that is on")
        yield ValueProposal(None, (False,), "a switch that is off")
    elif kind == "image":
        yield from _propose_image(item, use)
    elif kind == "audio":
        yield from _propose_audio(item)
    elif kind == "state":
        yield ValueProposal(None, (0,), "an initial state of zeros")
        yield ValueProposal((-1, 1), None, "a state with any values")
    elif item.dtype in _FLOATS:
        yield from _propose_number(kind, context)
    else:
        yield from _propose_integer(kind, item, use, bound, context)


def _propose_mask(item: TensorSpec) -> Iterator[ValueProposal]:
    if item.dtype == "bool" and "pad" in item.name.lower():
        yield ValueProposal(None, (False,), "no padding")
    yield ValueProposal(None, (1,), "a mask that keeps every position")
    yield ValueProposal(None, (0,), "an additive mask of zeros")


def _propose_image(item: TensorSpec, use: InputUse) -> Iterator[ValueProposal]:
    if item.dtype in ("uint8", "int8"):
        low = 0 if item.dtype == "uint8" else -128
        yield ValueProposal((low, low + 255), None, "8-bit pixels")
        return
    if use.scaled_from is not None:
        yield ValueProposal((0, use.scaled_from), None, "pixels; the graph scales them itself")
    yield ValueProposal((0, 1), None, "pixels, scaled; if yours are normalised, give their range")
    yield ValueProposal((0, 255), None, "pixels, not scaled")


def _propose_audio(item: TensorSpec) -> Iterator[ValueProposal]:
    if item.dtype == "int16":
        yield ValueProposal((-32768, 32767), None, "16-bit audio samples")
    else:
        yield ValueProposal((-1, 1), None, "audio samples, at full scale")


def _propose_number(kind: InputKind, context: ValueContext) -> Iterator[ValueProposal]:
    if kind == "rate":
        yield ValueProposal(None, (_SAMPLE_RATE,), "a common sample rate, in Hz")
    elif kind == "image size" and context.height:
        yield ValueProposal(None, (context.height,), "the size of the image")
    elif kind == "scale":
        yield ValueProposal(None, (1,), "a scale that changes nothing")
        yield ValueProposal(None, (0,), "a scale of zero")
    elif kind == "threshold":
        yield ValueProposal(None, (0.5,), "a threshold in the middle")
    yield ValueProposal((-1, 1), None, "features; the graph gives no hint")
    yield ValueProposal((0, 1), None, "features; the graph gives no hint")
    yield ValueProposal(None, (1,), "the graph gives no hint")


def _propose_integer(
    kind: InputKind, item: TensorSpec, use: InputUse, bound: int | None, context: ValueContext
) -> Iterator[ValueProposal]:
    if kind == "rate" or (use.compared and len(use.compared) > 1):
        known = sorted(use.compared, key=lambda one: one != _SAMPLE_RATE) or [_SAMPLE_RATE]
        why = "a value that the graph compares it with" if use.compared else "a common sample rate"
        yield from (ValueProposal(None, (one,), why) for one in known)
    if kind == "lengths" and context.length:
        yield ValueProposal(None, (context.length,), "the whole sequence")
    if kind == "image size" and context.height:
        yield ValueProposal(None, (context.height,), "the size of the image")
    if kind == "positions" and context.past:
        yield ValueProposal(None, (context.past,), "the position after the past ones")
    if bound is not None:
        yield ValueProposal((0, bound - 1), None, f"rows of a table of {bound} in the graph")
        yield ValueProposal(None, (0,), f"the first row of a table of {bound} in the graph")
    if "trip count" in use.roles or kind == "scale":
        yield ValueProposal(None, (1,), "a count of one")
    if item.dtype in ("uint8", "int8", "uint4", "int4"):
        yield ValueProposal(None, None, "any value of the type")
    elif kind == "tokens" and bound is None:
        yield ValueProposal(
            (0, 100), None, "ids of a small vocabulary; the graph does not say how large it is"
        )
    yield ValueProposal((0, 1), None, "the graph gives no hint")
    yield ValueProposal(None, (1,), "the graph gives no hint")
    yield ValueProposal(None, (0,), "the graph gives no hint")
    if context.length:
        yield ValueProposal(None, (context.length,), "the whole sequence")


def _of_type(proposal: ValueProposal, dtype: str) -> ValueProposal | None:
    """Returns a proposal whose numbers are of the input's type: `true` for bool, integers for integers.

    A range is cut to the type's; None for values outside it.
    """
    lowest, highest = INTEGER_RANGES.get(dtype, (-math.inf, math.inf))
    if proposal.values is not None and dtype != "string":
        values = tuple(_scalar(one, dtype) for one in proposal.values)
        fits = all(isinstance(one, str) or lowest <= one <= highest for one in values)
        return ValueProposal(None, values, proposal.reason) if fits else None
    if proposal.range is not None and dtype not in _FLOATS:
        low, high = proposal.range
        cut = max(math.ceil(low), lowest), min(math.floor(high), highest)
        return ValueProposal(cut, None, proposal.reason)
    return proposal


def _scalar(value: Scalar, dtype: str) -> Scalar:
    if dtype == "bool":
        return bool(value)
    return value if dtype in _FLOATS or isinstance(value, str) else int(value)
