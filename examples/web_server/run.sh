#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
pip install fastapi gunicorn uvicorn-worker

#: model
pip download --no-deps --dest wheels silero-vad==6.2.3
python -m zipfile -e wheels/silero_vad-6.2.3-*.whl models
ls models/silero_vad/data/silero_vad.onnx

#~ prepare
ortprep prepare

#~ result
ortprep show speech | sed -n '/on cpu, warm/,/peak MB/p'

#: start
touch web.log
WEB_CONCURRENCY=2 gunicorn app:app --worker-class uvicorn_worker.UvicornWorker --bind 127.0.0.1:8000 \
    --pid web.pid >>web.log 2>&1 &

#: ready
grep -m 2 "is ready" <(timeout 60 tail -F -n +1 web.log)

#: request
curl -sS -w '\n' http://127.0.0.1:8000/healthz
python make_voice.py
curl -sS -w '\n' --data-binary @voice.wav http://127.0.0.1:8000/speech
curl -sS -w '\n' --data-binary @app.py http://127.0.0.1:8000/speech

#: stop
kill "$(cat web.pid)"
wait
tail -n 1 web.log
