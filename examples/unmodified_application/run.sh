#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
python3 -m venv app
app/bin/pip install rapidocr==3.10.0 \
    onnxruntime=="$(python3 -c 'import onnxruntime; print(onnxruntime.__version__)')"

#: plain
app/bin/python draw_page.py
app/bin/rapidocr -img page.png 2>/dev/null | grep -o "txts=([^)]*)" | tee plain.txt

#: adopt
ortprep adopt -- app/bin/rapidocr -img page.png >/dev/null 2>adopt.txt
grep -v INFO adopt.txt

#: spec
ls configs
cat configs/PP-OCRv6_rec_small.yaml

#~ prepare
ortprep prepare

#: run-on-bundles
ortprep run --verbose -- app/bin/rapidocr -img page.png 2>run.txt | grep -o "txts=([^)]*)" | tee bundles.txt
cmp plain.txt bundles.txt && grep ortprep run.txt

#~ measure
ortprep run --print-environment >bundles.env
python3 measure.py 5 \
    "app/bin/rapidocr -img page.png" \
    "ortprep run -- app/bin/rapidocr -img page.png" \
    "env $(xargs <bundles.env) app/bin/rapidocr -img page.png"
