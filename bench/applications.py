"""Packages from PyPI that run their own models, as applications: what they are fed, and what they answer.

    python applications.py draw NAME FOLDER SEED COUNT     writes inputs
    python applications.py run NAME FOLDER [TIMES.json]    prints the answers, and keeps seconds per input

It runs in the application's own environment, and imports nothing of this repository. `bench.precision`
measures the applications.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WORDS = "invoice total amount delivery address reference payment order customer account date".split()  # noqa: SIM905
PAGES, FIGURES = ((736, 1000), (1000, 736), (900, 900)), ((640, 480), (480, 640), (512, 512))


class Application(NamedTuple):
    """A package.

    Attributes:
        requirements: What pip installs, beside ONNX Runtime.
        judged: Number of inputs that the application judges on.
        held_out: Number of inputs that it is measured on.
        draw: Writes input number N into a folder, from a generator of random numbers.
        open: Makes a function that gives the answers to an input, a line each.
    """

    requirements: tuple[str, ...]
    judged: int
    held_out: int
    draw: Callable[[random.Random, int, Path], None]
    open: Callable[[], Callable[[Path], Iterator[str]]]


def draw_page(rng: random.Random, number: int, folder: Path) -> None:
    """Draws a page of text: three layouts, two sizes of letters, two fonts, some noisy, some turned."""
    import cv2
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    (width, height), columns, size = PAGES[number % 3], number % 3 + 1, (22, 30)[number // 3 % 2]
    page = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size)
    texts = [
        ((40 + column * width // columns, top), " ".join(rng.choice(WORDS) for _ in range(4 // columns)))
        for top in range(40, height - 40 - size, 3 * size)
        for column in range(columns)
    ]
    if number % 2:
        pixels = np.array(page)
        for (left, top), text in texts:
            start, scale = (left, top + size), size / 34
            cv2.putText(pixels, text, start, cv2.FONT_HERSHEY_SIMPLEX, scale, (20, 20, 20), 2, cv2.LINE_AA)
        page = Image.fromarray(pixels)
    else:
        for place, text in texts:
            draw.text(place, text, "black", font)
    if number % 5 == 3:
        noise = np.random.default_rng(number).normal(0, 12, (height, width, 3))
        page = Image.fromarray((np.array(page) + noise).clip(0, 255).astype(np.uint8))
    if number % 5 == 4:
        page = page.rotate(1.5, fillcolor="white")
    page.save(folder / f"{number:02}.png")


def open_rapidocr() -> Callable[[Path], Iterator[str]]:
    """Returns what reads the lines of a page."""
    from rapidocr import RapidOCR

    ocr = RapidOCR(params={"Global.log_level": "critical"})
    return lambda page: iter(ocr(page).txts or ())


def draw_figure(rng: random.Random, number: int, folder: Path) -> None:
    """Draws one or two people, simple enough for a program and good enough for a detector of faces."""
    from PIL import Image, ImageDraw, ImageFilter

    width, height = FIGURES[number % 3]
    image = Image.new("RGB", (width, height), tuple(rng.randrange(60, 220) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randrange(1, 3)):
        x, y, r = rng.randrange(120, width - 120), rng.randrange(120, height - 160), rng.randrange(45, 90)
        skin = (rng.randrange(190, 240), rng.randrange(150, 190), rng.randrange(120, 160))
        draw.ellipse((x - r * 1.3, y + r * 0.9, x + r * 1.3, y + r * 5), fill=skin)
        draw.ellipse((x - r * 0.75, y - r, x + r * 0.75, y + r), fill=skin)
        for side in (x - r * 0.33, x + r * 0.33):
            for half, colour in ((0.16, "white"), (0.08, (40, 30, 20))):
                draw.ellipse((side - r * half, y - r * 0.25, side + r * half, y - r * 0.08), fill=colour)
        draw.arc((x - r * 0.3, y + r * 0.2, x + r * 0.3, y + r * 0.6), 20, 160, fill=(150, 40, 40), width=5)
        draw.pieslice((x - r * 0.8, y - r * 1.1, x + r * 0.8, y + r * 0.3), 190, 350, fill=(50, 30, 20))
    image.filter(ImageFilter.GaussianBlur(1.5)).save(folder / f"{number:02}.png")


def open_nudenet() -> Callable[[Path], Iterator[str]]:
    """Returns what finds faces and more; a box counts to 32 pixels, and a doubtful one not at all."""
    from nudenet import NudeDetector

    detector = NudeDetector()

    def find(image: Path) -> Iterator[str]:
        for one in detector.detect(str(image)):
            if one["score"] >= 0.4:
                yield f"{one['class']} {[round(side / 32) for side in one['box']]}"

    return find


def draw_captcha(rng: random.Random, number: int, folder: Path) -> None:
    """Draws four turned letters and digits behind lines."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (160, 60), (240, 240, 240))
    for place in range(4):
        letter = Image.new("RGBA", (40, 50), (0, 0, 0, 0))
        text, colour = rng.choice(string.ascii_lowercase + string.digits), tuple(rng.choices(range(120), k=3))
        ImageDraw.Draw(letter).text((8, 5), text, colour, ImageFont.load_default(34))
        letter = letter.rotate(rng.uniform(-20, 20))
        image.paste(letter, (5 + 38 * place, 5), letter)
    for _ in range(4):
        ends = [(rng.randrange(160), rng.randrange(60)) for _ in range(2)]
        ImageDraw.Draw(image).line(ends, fill=(rng.randrange(200),) * 3)
    image.save(folder / f"{number:03}.png")


def open_ddddocr() -> Callable[[Path], Iterator[str]]:
    """Returns what reads a captcha."""
    import ddddocr

    ocr = ddddocr.DdddOcr(show_ad=False)
    return lambda image: iter([ocr.classification(image.read_bytes())])


def copy_file(rng: random.Random, number: int, folder: Path) -> None:
    """Copies a file of the environment: programs, tables, pictures, texts in many languages."""
    files = sorted(one for one in Path(sys.prefix).rglob("*") if one.is_file() and one.stat().st_size < 2**20)
    shutil.copy(rng.choice(files), folder / f"{number:03}")


def open_magika() -> Callable[[Path], Iterator[str]]:
    """Returns what tells the type of a file."""
    from magika import Magika

    magika = Magika()
    return lambda file: iter([magika.identify_path(file).output.label])


APPLICATIONS = {
    "rapidocr": Application(
        ("rapidocr==3.10.0", "opencv-python-headless==5.0.0.93"), 24, 20, draw_page, open_rapidocr
    ),
    "nudenet": Application(("nudenet==3.4.2", "pillow"), 80, 40, draw_figure, open_nudenet),
    "ddddocr": Application(("ddddocr==1.6.1", "pillow"), 100, 100, draw_captcha, open_ddddocr),
    "magika": Application(("magika==1.0.3",), 100, 100, copy_file, open_magika),
}


def main(command: str, name: str, place: str, *more: Any) -> None:
    """Draws inputs, or answers them."""
    application, folder = APPLICATIONS[name], Path(place)
    if command == "draw":
        folder.mkdir()
        rng = random.Random(int(more[0]))
        for number in range(int(more[1])):
            application.draw(rng, number, folder)
        return
    answer, times = application.open(), []
    for path in sorted(folder.iterdir()):
        began = time.monotonic()
        lines = list(answer(path))
        times.append(time.monotonic() - began)
        for line in lines:
            print(path.name, line)
    if more:
        Path(more[0]).write_text(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
