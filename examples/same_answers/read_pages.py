"""Prints the text of every page: `python read_pages.py FOLDER [TIMES]`; TIMES gets seconds per page."""

import json
import sys
import time
from pathlib import Path

from rapidocr import RapidOCR

ocr, times = RapidOCR(params={"Global.log_level": "critical"}), []
for page in sorted(Path(sys.argv[1]).glob("*.png")):
    began = time.monotonic()
    found = ocr(page)
    times.append(time.monotonic() - began)
    for text in found.txts or ():
        print(page.name, text)
if len(sys.argv) > 2:
    Path(sys.argv[2]).write_text(json.dumps(times))
