#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: model
pip download --no-deps --dest wheels magika==1.0.3
python -m zipfile -e wheels/magika-1.0.3-*.whl models
ls models/magika/models/standard_v3_3/model.onnx

#~ prepare
ortprep prepare

#: first
python file_type.py file_type.py run.sh

#: again
python file_type.py configs/magika.yaml models/magika/models/standard_v3_3/model.onnx

#~ status
ortprep host --status

#~ stop
ortprep host --stop
