"""Usage data that ONNX Runtime sends to its maker, and how it is turned off."""

from __future__ import annotations

import os

TELEMETRY_VARIABLE, TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY", "1"
TELEMETRY_SINCE = (1, 29)
"""First version of ONNX Runtime whose official Linux wheels send anything."""

_TRUE = frozenset({"1", "true", "yes", "on"})


def is_telemetry_off(value: str) -> bool:
    """Says whether a value of the variable turns telemetry off (tried with 1.31.1): 0 and "" do not."""
    return value.strip().lower() in _TRUE


def disable_telemetry() -> None:
    """Turns ONNX Runtime's telemetry off in this process and its children; call it before the first import.

    Official Linux wheels since 1.29 upload usage data, model file names and weight hashes included, with a
    thread and a database below `~/.cache/Microsoft`. The variable turns all of that off, if it is set before
    the library is loaded (microsoft/onnxruntime#25573, #27379). A value that the user set stays.
    """
    os.environ.setdefault(TELEMETRY_VARIABLE, TELEMETRY_OFF)
