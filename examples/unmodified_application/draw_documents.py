"""Draws pages of text: `python draw_documents.py FOLDER SEED COUNT`. Three layouts, two sizes of letters."""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WORDS = """invoice total amount delivery address reference quantity payment order customer account balance
date signature number street city please within days thank you shipping product price discount tax"""
SIZES = ((736, 1000), (1000, 736), (900, 900))


def draw_page(rng: random.Random, number: int) -> Image.Image:
    """Returns a page with one, two or three columns of words and numbers."""
    (width, height), columns, size = SIZES[number % 3], number % 3 + 1, (22, 30)[number % 2]
    page = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size)
    for top in range(40, height - 40 - size, 3 * size):
        for column in range(columns):
            words = [rng.choice(WORDS.split()) for _ in range(4 // columns)]
            text = " ".join([*words, f"{rng.randrange(10000) / 100:.2f}"])
            draw.text((40 + column * width // columns, top), text, "black", font)
    return page


if __name__ == "__main__":
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir()
    rng = random.Random(seed)
    for number in range(count):
        draw_page(rng, number).save(folder / f"{number:02}.png")
