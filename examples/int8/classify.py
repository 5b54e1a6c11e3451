"""Says what type a file is: `python classify.py FILE`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from make_samples import read_file

from ortprep.runtime import load

logging.basicConfig(level=logging.INFO)
labels = json.loads(Path("models/config.min.json").read_text())["target_labels_space"]
inputs = {"bytes": read_file(Path(sys.argv[1]))[None]}
for precision in ("fastest-within-gate", "fp32"):
    session = load("artifacts/file-type", precision=precision)
    (scores,) = session.run(None, inputs)
    print(precision, labels[scores[0].argmax()], f"{scores[0].max():.3f}")
