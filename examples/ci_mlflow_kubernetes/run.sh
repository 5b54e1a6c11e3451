#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: install
pip install mlflow kubernetes-validate check-jsonschema

#: models
pip download --no-deps --dest wheels silero-vad==6.0.0
pip download --no-deps --dest wheels silero-vad==6.2.3
for version in 6.0.0 6.2.3; do python -m zipfile -e wheels/silero_vad-$version-*.whl wheels/$version; done
mkdir models

#: keys
openssl ecparam -name prime256v1 -genkey -noout -out key.pem
openssl ec -in key.pem -pubout -out key.pub 2>/dev/null

#: server
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
mlflow server --host 127.0.0.1 --port 8000 --workers 1 --backend-store-uri sqlite:///mlflow.db \
    --artifacts-destination ./mlartifacts >mlflow.log 2>&1 &
curl -sS -w '\n' --retry 600 --retry-connrefused --retry-delay 1 http://127.0.0.1:8000/health 2>/dev/null

#: settings
export ORTPREP_REGISTRY=mlflow+http://127.0.0.1:8000
export FAIL_OVER=900% MAX_REGRESSION=10  # wide: this computer does other work too

#~ first
cp wheels/6.0.0/silero_vad/data/silero_vad_16k_op15.onnx models/voice.onnx
bash prepare.sh 2>prepare.log
grep "nothing to compare" prepare.log
bash publish.sh 1.0 key.pem

#~ update
cp wheels/6.2.3/silero_vad/data/silero_vad_16k_op15.onnx models/voice.onnx
bash prepare.sh >compare.txt
bash publish.sh 1.1 key.pem

#~ refused
cp wheels/6.2.3/silero_vad/data/silero_vad.onnx models/voice.onnx
FAIL_OVER=20% bash prepare.sh >compare.txt 2>prepare.log || echo refused
grep -m 1 "size:" prepare.log

#~ versions
ortprep versions voice | grep -E "label|portable"

#: validate
check-jsonschema --builtin-schema vendor.github-workflows workflow.yaml
kubernetes-validate --strict kubernetes.yaml

#~ pull
ortprep pull voice@production --out pulled/voice --verify key.pub

#~ job
BUNDLE=pulled/voice BUNDLE_KEY=key.pub python job.py

#: changed
cp -r pulled changed
printf x >>changed/voice/requirements.txt
BUNDLE=changed/voice BUNDLE_KEY=key.pub python job.py 2>job.log || echo refused
grep "Error:" job.log

#: rollback
ortprep rollback voice production

#: stop
kill %1
