#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
pip install fastapi gunicorn uvicorn-worker

#: model
pip download --no-deps --dest wheels magika==1.0.3
python -m zipfile -e wheels/magika-1.0.3-*.whl wheels/magika
cp -r wheels/magika/magika/models/standard_v3_3 models
ls models

#~ prepare
ortprep prepare

#~ result
ortprep show file-type | sed -n '/on cpu, warm/,/sooner/p'

#: start
gunicorn app:app --workers 2 --worker-class uvicorn_worker.UvicornWorker --bind 127.0.0.1:8000 \
    --pid web.pid >web.log 2>&1 &

#: ready
grep -m 2 "is ready" <(timeout 60 tail -F -n +1 web.log)

#: request
curl -sS -w '\n' http://127.0.0.1:8000/healthz
curl -sS -w '\n' --data-binary @app.py http://127.0.0.1:8000/type
curl -sS -w '\n' --data-binary @run.sh http://127.0.0.1:8000/type
curl -sS -w '\n' --data-binary "" http://127.0.0.1:8000/type

#: stop
kill "$(cat web.pid)"
wait
tail -n 1 web.log
