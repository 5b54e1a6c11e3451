#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
python3 -m venv app
app/bin/pip install rapidocr==3.10.0 \
    onnxruntime=="$(python3 -c 'import onnxruntime; print(onnxruntime.__version__)')"

#: plain
app/bin/python draw_documents.py pages 1 4
app/bin/python read_pages.py pages 2>/dev/null >pages.txt
head -n 3 pages.txt

#: adopt
ortprep adopt --precision auto --record-inputs 8 --judge stdout -- app/bin/python read_pages.py pages >adopt.txt

#: spec
grep convert configs/PP-OCRv6_det_small.yaml
ls configs/samples

#~ prepare
ortprep prepare

#~ show
ortprep show PP-OCRv6_det_small | grep -E "judged|calibrated|left out"

#: other-pages
app/bin/python draw_documents.py others 2 6
app/bin/python read_pages.py others plain.json 2>/dev/null >plain.txt
ortprep run -- app/bin/python read_pages.py others bundles.json 2>/dev/null >bundles.txt
cmp plain.txt bundles.txt && echo "the same text"
