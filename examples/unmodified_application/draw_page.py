"""Writes page.png, a page of text."""

from PIL import Image, ImageDraw, ImageFont

page = Image.new("RGB", (480, 480), "white")
for number, line in enumerate(("Invoice number 2026", "Total amount due 31.40", "Please pay within 30 days")):
    ImageDraw.Draw(page).text(
        (40, 40 + 140 * number), line, fill="black", font=ImageFont.load_default(size=32)
    )
page.save("page.png")
