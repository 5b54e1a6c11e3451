"""Optical character recognition: three models in one process read the lines of a page.

Usage: python read_text.py page.png …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ortprep.runtime import load

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # ortprep, if imported first, turns its usage data off

BUNDLES = Path(os.environ.get("BUNDLES", "artifacts"))
LINE_HEIGHT, DIRECTION_WIDTH = 48, 192
TEXT, UPSIDE_DOWN = 0.3, 0.9  # probabilities that count
MARGIN = 0.8  # of a line's height: the model finds the middle of the letters


def to_tensor(image: Image.Image, width: int, height: int) -> np.ndarray[Any, Any]:
    """Returns an image as [1, 3, height, width] from -1 to 1, channels in the order blue, green, red."""
    pixels = np.asarray(image.resize((width, height)), np.float32)[..., ::-1]
    return (pixels / 127.5 - 1).transpose(2, 0, 1)[None]


def find_lines(is_text: np.ndarray[Any, Any]) -> Iterator[tuple[float, float, float, float]]:
    """Yields (left, top, right, bottom) of every band of rows that has text."""
    edges = np.flatnonzero(np.diff(is_text.any(axis=1), prepend=False, append=False))
    for top, bottom in edges.reshape(-1, 2):
        columns, margin = np.flatnonzero(is_text[top:bottom].any(axis=0)), MARGIN * (bottom - top)
        yield columns[0] - margin, top - margin, columns[-1] + margin, bottom + margin


def read_page(sessions: dict[str, InferenceSession], page: Image.Image) -> Iterator[str]:
    """Yields the text of every line of a page, from top to bottom."""
    metadata = sessions["recognise"].get_modelmeta().custom_metadata_map
    characters = ["", *metadata["character"].splitlines(), " "]  # the first one is the blank
    width, height = (max(32, side // 32 * 32) for side in page.size)
    page = page.convert("RGB").resize((width, height))
    (found,) = sessions["detect"].run(None, {"x": to_tensor(page, width, height)})
    for box in find_lines(found[0, 0] > TEXT):
        line = page.crop(box)
        (scores,) = sessions["direction"].run(None, {"x": to_tensor(line, DIRECTION_WIDTH, LINE_HEIGHT)})
        upright = line.rotate(180 if scores[0, 1] > UPSIDE_DOWN else 0)
        tensor = to_tensor(upright, LINE_HEIGHT * line.width // line.height, LINE_HEIGHT)
        (scores,) = sessions["recognise"].run(None, {"x": tensor})
        best = scores[0].argmax(axis=1)  # a character goes on until another or a blank
        yield "".join(characters[one] for one in best[np.diff(best, prepend=0) != 0])


if __name__ == "__main__":
    models = {name: load(BUNDLES / name) for name in ("detect", "direction", "recognise")}
    for path in sys.argv[1:]:
        print(*read_page(models, Image.open(path)), sep="\n")
