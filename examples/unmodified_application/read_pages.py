"""Prints the text of every page: `python read_pages.py FOLDER`."""

import sys
from pathlib import Path

from rapidocr import RapidOCR

ocr = RapidOCR(params={"Global.log_level": "critical"})
for page in sorted(Path(sys.argv[1]).glob("*.png")):
    for text in ocr(page).txts or ():
        print(page.name, text)
