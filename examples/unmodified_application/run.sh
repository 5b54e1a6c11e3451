#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
python3 -m venv app
app/bin/pip install rapidocr==3.10.0 \
    onnxruntime=="$(python3 -c 'import onnxruntime; print(onnxruntime.__version__)')"

#: plain
app/bin/python draw_documents.py pages 1 4
app/bin/python read_pages.py pages 2>/dev/null >plain.txt
wc -l plain.txt
head -n 3 plain.txt

#: adopt
ortprep adopt --precision auto --record-inputs 8 --judge stdout -- \
    app/bin/python read_pages.py pages >/dev/null 2>adopt.txt
grep -v INFO adopt.txt

#: spec
ls configs
sed -n '/^name/,$p' configs/PP-OCRv6_rec_small.yaml

#~ prepare
ortprep prepare

#~ show
ortprep show PP-OCRv6_det_small | grep -E "calibrated|judged"

#: run-on-bundles
app/bin/python draw_documents.py others 2 6
app/bin/python read_pages.py others 2>/dev/null >others-plain.txt
ortprep run --verbose -- app/bin/python read_pages.py others 2>run.txt >others-bundles.txt
cmp others-plain.txt others-bundles.txt && echo "the same text"

#~ sessions
grep ortprep: run.txt

#~ measure
python3 measure.py 5 \
    "app/bin/python read_pages.py others" \
    "ortprep run -- app/bin/python read_pages.py others" \
    "env ORTPREP_PRECISION=fp32 ortprep run -- app/bin/python read_pages.py others"
