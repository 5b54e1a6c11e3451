#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: model
pip download --no-deps --dest wheels silero-vad==6.2.3
python -m zipfile -e wheels/silero_vad-6.2.3-*.whl models
ls models/silero_vad/data/silero_vad.onnx

#: init
ortprep init models/silero_vad/data/silero_vad.onnx --name silero-vad

#: first-spec
cat configs/silero-vad.yaml

#: edit
cp silero-vad.yaml configs/

#~ prepare
ortprep prepare silero-vad

#: again
ortprep prepare silero-vad

#~ show
ortprep show silero-vad

#~ files
ls artifacts/silero-vad

#~ check
ortprep check silero-vad

#~ job
python silence.py

#~ damage
cp -r artifacts/silero-vad damaged
for file in damaged/*/*; do printf x >>"$file"; done
python -c 'import ortprep.runtime; ortprep.runtime.load("damaged")' 2>&1 | tail -n 4 || true
