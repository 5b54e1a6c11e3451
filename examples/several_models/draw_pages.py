"""Writes two pages of text, page.png and turned.png, which is upside down."""

from PIL import Image, ImageDraw, ImageFont

LINES = ("Invoice number 2026", "Total amount due 31.40", "Please pay within 30 days")

page = Image.new("RGB", (640, 480), "white")
for number, line in enumerate(LINES):
    ImageDraw.Draw(page).text(
        (40, 40 + 140 * number), line, fill="black", font=ImageFont.load_default(size=32)
    )
page.save("page.png")
page.rotate(180).save("turned.png")
