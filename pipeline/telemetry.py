"""Usage data that ONNX Runtime sends to its maker, and how it is turned off."""

from __future__ import annotations

import os

TELEMETRY_VARIABLE = "ORT_DISABLE_TELEMETRY"


def disable_telemetry() -> None:
    """Turns ONNX Runtime's telemetry off in this process and its children; call it before the first import.

    Official Linux wheels since 1.29 upload usage data, model file names and weight hashes included, with a
    thread and a database below `~/.cache/Microsoft`. The variable turns all of that off, if it is set before
    the library is loaded (microsoft/onnxruntime#25573, #27379). A value that the user set stays.
    """
    os.environ.setdefault(TELEMETRY_VARIABLE, "1")
