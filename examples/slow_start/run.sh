#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: model
export ORT_DISABLE_TELEMETRY=1 TIMEFORMAT='%R s'
pip download --no-deps --dest wheels rapidocr==3.10.0
python -m zipfile -e wheels/rapidocr-3.10.0-*.whl models
model=models/rapidocr/models/PP-OCRv6_rec_small.onnx

#~ start
python timed_job.py $model

#~ imports
python -X importtime -c "import onnxruntime" 2>&1 | sort -t "|" -k 2 -n | tail -n 4

#~ cold
python evict.py $model
python timed_job.py $model
time cat $model >/dev/null
python evict.py $model
time cat $model >/dev/null

#~ container
taskset --cpu-list 0 ortprep doctor env | grep -E "^  (processor|cores|memory|/dev/shm|bundles)|^env:"

#~ session
taskset --cpu-list 0 ortprep doctor init $model --rounds 3 --shape x=1,3,48,480

#~ prepare
ortprep prepare

#~ result
ortprep show text | sed -n '/on cpu, .* cache/,/peak MB/p'

#~ prepared
python timed_job.py artifacts/text
python evict.py artifacts/text/*/*
python timed_job.py artifacts/text
