"""Records what this ONNX Runtime says: `python -m tests.doctor.environment.record_facts > FILE`.

Run with the wheel in question first on PYTHONPATH; folders are renamed, so that no machine's show.
"""

import json
import sys
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.children.child import run_child
from ortprep.doctor.environment_facts import read_runtime, try_provider

_SITE = "/opt/venv/lib/python3.11/site-packages"


def record():
    runtime = read_runtime()
    found = {name: run_child(try_provider, name).value for name in runtime.available}
    attempts = {name: {"failure": failure, "output": output} for name, (failure, output) in found.items()}
    text = json.dumps(encode({"runtime": runtime, "attempts": attempts}), indent=1)
    for folder in (str(Path(runtime.folder).parent), *filter(None, sys.path)):
        text = text.replace(folder, _SITE) if "site-packages" in folder or "onnxruntime" in folder else text
    return text


if __name__ == "__main__":
    sys.stdout.write(record() + "\n")
