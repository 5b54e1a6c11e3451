#!/usr/bin/env bash
# Usage: bash run.sh
set -euo pipefail

#: model
pip download --no-deps --dest wheels magika==1.0.3
python -m zipfile -e wheels/magika-1.0.3-*.whl wheels/magika
cp -r wheels/magika/magika/models/standard_v3_3 models

#: data
pip download --no-deps --dest wheels sphinx==9.0.4
python -m zipfile -e wheels/sphinx-9.0.4-*.whl files
python make_samples.py files
ls samples
python -c 'import numpy; print({name: (a.dtype, a.shape) for name, a in numpy.load("samples/000.npz").items()})'

#~ strict
ortprep prepare
ortprep show file-type | grep -A 1 "left out"

#~ metric
sed -i "s/top1: 0.99/metric: 'agreement:same_type', metric_at_least: 0.95/" configs/file-type.yaml
grep "gate:" configs/file-type.yaml
ortprep prepare
ortprep show file-type | grep -A 1 "int8: taken"

#~ result
ortprep show file-type | sed -n '/: variants/,/top-1/p;/cpu-int8   int8/p'

#~ use
python classify.py make_samples.py
