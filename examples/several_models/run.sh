#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: models
pip install pillow
pip download --no-deps --dest wheels rapidocr==3.10.0
python -m zipfile -e wheels/rapidocr-3.10.0-*.whl models
ls models/rapidocr/models/

#~ prepare
ortprep prepare

#: up-to-date
ortprep prepare

#~ check
for name in detect direction recognise; do ortprep check $name; done

#: read
python draw_pages.py
python read_text.py page.png turned.png

#~ place
ortprep place detect direction recognise --devices cpu

#: image
mkdir image && cp -r artifacts image/models
BUNDLES=image/models python read_text.py page.png
grep -h == image/models/*/requirements.txt | sort -u
