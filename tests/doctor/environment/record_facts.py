"""Records what this ONNX Runtime says: `python -m tests.doctor.environment.record_facts > FILE`.

Run with the wheel in question first on PYTHONPATH; folders are renamed, so that no machine's show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ortprep.children.child import run_child
from ortprep.doctor.environment.facts import ort_probe

_SITE = "/opt/venv/lib/python3.11/site-packages"


def record() -> str:
    described = run_child(ort_probe.describe_runtime, {}).value
    runtime = described["runtime"]
    recording = {
        **described,
        "attempts": {name: _attempt(name) for name in runtime["available"]},
    }
    text = json.dumps(recording, indent=1)
    for folder in (str(Path(runtime["folder"]).parent), *filter(None, sys.path)):
        text = text.replace(folder, _SITE) if "site-packages" in folder or "onnxruntime" in folder else text
    return text


def _attempt(provider: str) -> dict[str, Any]:
    return run_child(ort_probe.try_provider, {"provider": provider}).value


if __name__ == "__main__":
    sys.stdout.write(record() + "\n")
