"""Optical character recognition: three models in one pool read the lines of a page.

Usage: python read_text.py page.png …
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from ortprep.runtime import SessionPool, load

MODELS = {name: f"artifacts/ocr-{name}" for name in ("detect", "direction", "recognise")}
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


def read_page(pool: SessionPool, page: Image.Image, characters: list[str]) -> Iterator[str]:
    """Yields the text of every line of a page, from top to bottom."""
    width, height = (max(32, side // 32 * 32) for side in page.size)
    page = page.convert("RGB").resize((width, height))
    (found,) = pool.run({"x": to_tensor(page, width, height)}, model="detect").values()
    lines = [page.crop(box) for box in find_lines(found[0, 0] > TEXT)]
    requests = []
    for line in lines:
        (scores,) = pool.run({"x": to_tensor(line, DIRECTION_WIDTH, LINE_HEIGHT)}, model="direction").values()
        upright = line.rotate(180 if scores[0, 1] > UPSIDE_DOWN else 0)
        requests.append({"x": to_tensor(upright, LINE_HEIGHT * line.width // line.height, LINE_HEIGHT)})
    for answer in pool.map(requests, model="recognise"):
        best = next(iter(answer.values()))[0].argmax(axis=1)  # a character goes on until another or a blank
        yield "".join(characters[one] for one in best[np.diff(best, prepend=0) != 0])


if __name__ == "__main__":
    metadata = load(MODELS["recognise"]).get_modelmeta().custom_metadata_map
    known = ["", *metadata["character"].splitlines(), " "]  # the first one is the blank
    with SessionPool(MODELS) as workers:
        for path in sys.argv[1:]:
            print(*read_page(workers, Image.open(path), known), sep="\n")
