"""Says what is in files: `python file_type.py FILE…`."""

import json
import sys
from pathlib import Path

import numpy as np

from ortprep.runtime import connect

HERE = Path(__file__).parent
LABELS = json.loads((HERE / "models/magika/models/standard_v3_3/config.min.json").read_text())
BLOCK, SIZE, PADDING = 4096, 1024, 256


def read_features(path: Path) -> np.ndarray:
    """Returns the file's beginning and end as the model takes them, one value per byte, shape (2048,)."""
    with path.open("rb") as file:
        begin = file.read(BLOCK)
        file.seek(max(0, path.stat().st_size - BLOCK))
        end = file.read(BLOCK)
    begin, end = begin.lstrip()[:SIZE], end.rstrip()[-SIZE:]
    row = np.full(2 * SIZE, PADDING, np.int32)
    row[: len(begin)] = np.frombuffer(begin, np.uint8)
    row[2 * SIZE - len(end) :] = np.frombuffer(end, np.uint8)
    return row


with connect(HERE / "artifacts/magika", start=True) as session:
    for name in sys.argv[1:]:
        (scores,) = session.run(None, {"bytes": read_features(Path(name))[None]})
        best = scores[0].argmax()
        print(f"{name}: {LABELS['target_labels_space'][best]} ({scores[0, best]:.0%})")
