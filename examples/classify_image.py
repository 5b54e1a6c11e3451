"""Image classification: says how far each scanned page is turned.

Usage: python classify_image.py scan.png …
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from PIL import Image

from ortprep.runtime import load

LABELS = (0, 90, 180, 270)
SHORT_SIDE, CROP = 256, 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def to_tensor(image: Image.Image) -> np.ndarray[Any, Any]:
    """Returns the middle of an image as [3, 224, 224], channels in the order blue, green, red."""
    scale = SHORT_SIDE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    resized = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(resized.crop((left, top, left + CROP, top + CROP)), np.float32)[..., ::-1]
    return ((pixels / 255 - MEAN) / DEVIATION).astype(np.float32).transpose(2, 0, 1)


def main(paths: list[str]) -> None:
    """Prints a line per image."""
    session = load("artifacts/page-orientation")  # an onnxruntime.InferenceSession
    for path in paths:
        (scores,) = session.run(None, {"x": to_tensor(Image.open(path))[None]})
        best = int(scores[0].argmax())
        print(f"{path}: turned clockwise by {LABELS[best]} degrees ({scores[0, best]:.2f})")


if __name__ == "__main__":
    main(sys.argv[1:])
