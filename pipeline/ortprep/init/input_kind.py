"""What an input is, by its name, type, rank and neighbours in the graph. Pure."""

from __future__ import annotations

import re
from typing import Literal

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import InputUse

InputKind = Literal[
    "audio",
    "features",
    "flag",
    "image",
    "image size",
    "lengths",
    "mask",
    "positions",
    "rate",
    "scale",
    "state",
    "text",
    "threshold",
    "tokens",
    "other",
]
"""What an input is; `features` are floats that nothing says more of."""

_BY_NAME: tuple[tuple[str, InputKind], ...] = (
    (r"(^|_)(sr|fs)$|sampl(e|ing)_?rate", "rate"),
    (r"im(age|g)?_?(shape|size)|orig.*size|target_size|origin_shape", "image size"),
    (r"mask", "mask"),
    (r"(^|_)(len|lens|length|lengths)$|_len_|n_frames|num_frames|input_lengths?|seq_len", "lengths"),
    (
        r"past|cache|state|hidden|memory|^(h|c|hn|cn)_?[0-9]*$|^(in_)?[hc]0$|context$|buffer|_rnn|_conv$",
        "state",
    ),
    (r"position_ids?|pos_ids?", "positions"),
    (r"threshold|iou|conf$", "threshold"),
    (r"scale|speed|temperature|alpha|factor|guidance", "scale"),
    (r"use_cache|branch|flag|train", "flag"),
)
"""What names mean, the first that fits counts; they are looked up in lower case."""

_IMAGE_NAME = r"image|img|pixel|photo|frame|picture|face|data_0"
_AUDIO_NAME = r"audio|wav|speech|pcm|samples|signal|sound"
_TOKEN_NAME = r"ids?$|tokens?|text|phone|^x$|input|sids?$|speaker|lang"
_AUDIO_OPERATORS = frozenset({"STFT", "DFT", "MelWeightMatrix"})
_FLOATS = frozenset({"float16", "float32", "float64", "bfloat16"})
_MIN_AUDIO_WINDOW = 32


def classify(item: TensorSpec, use: InputUse, bound: int | None) -> InputKind:
    """Returns what an input is.

    Args:
        item: Its name, type and shape.
        use: How the graph uses it.
        bound: Rows of the table that it indexes, None if it indexes none of known size.
    """
    if item.dtype == "string":
        return "text"
    rank = len(item.shape) if item.shape is not None else use.rank
    if "state" in use.roles or "lengths" in use.roles:
        return "state" if "state" in use.roles else "lengths"
    name = item.name.lower()
    by_name = next((kind for pattern, kind in _BY_NAME if re.search(pattern, name)), None)
    if by_name is not None and _may_be(by_name, item.dtype, rank, bound):
        return by_name
    if item.dtype == "bool":
        return "flag"
    if _is_image(name, item, use, rank):
        return "image"
    if item.dtype in _FLOATS or item.dtype == "int16":
        return "audio" if _is_audio(name, item, use, rank) else "features"
    if use.compared and rank in (None, 0, 1):
        return "rate" if all(8000 <= one <= 96_000 for one in use.compared) else "other"
    if bound is not None or (rank == 2 and re.search(_TOKEN_NAME, name)):
        return "tokens"
    return "other"


def _may_be(kind: InputKind, dtype: str, rank: int | None, bound: int | None) -> bool:
    """Says whether an input of that type can be what its name says."""
    is_float = dtype in _FLOATS
    if kind in ("rate", "threshold", "scale", "image size"):
        return rank is None or rank <= 2
    if kind == "lengths":
        return not is_float and (rank is None or rank <= 1)
    if kind == "state":
        return (is_float and rank not in (0, None)) or (bound is None and rank not in (0, 1, 2, None))
    if kind == "positions":
        return not is_float
    if kind == "flag":
        return rank is None or rank <= 1
    return True


def _is_image(name: str, item: TensorSpec, use: InputUse, rank: int | None) -> bool:
    if rank not in (3, 4, 5) or item.dtype in ("int32", "int64"):
        return False
    shape = item.shape or ()
    if rank == 3:
        return item.dtype == "uint8" or (
            bool(re.search(_IMAGE_NAME, name)) and 3 in (shape[0:1] + shape[-1:])
        )
    has_channels = any(axis in (1, 3, 4) for axis in shape[1:])
    return (
        len(use.spatial) >= 2 or has_channels or bool(re.search(_IMAGE_NAME, name)) or item.dtype == "uint8"
    )


def _is_audio(name: str, item: TensorSpec, use: InputUse, rank: int | None) -> bool:
    if rank not in (1, 2, 3, None):
        return False
    shape = item.shape or ()
    if rank == 3 and not {1, 2} & set(shape[1:]):
        return False
    if _AUDIO_OPERATORS & set(use.operators) or use.window >= _MIN_AUDIO_WINDOW:
        return True
    if rank == 2 and len(use.spatial) == 1:
        return True  # slid over without channels
    last_is_open = not shape or not isinstance(shape[-1], int) or shape[-1] >= 256
    return last_is_open and bool(re.search(_AUDIO_NAME, name))
