"""What a benchmark writes: figures in few lines, the machine and versions, no names of hosts or people."""

from __future__ import annotations

import json
from typing import Any

from ortprep.children.child import run_child
from ortprep.stages.core.provenance import describe_environment


def describe_machine() -> dict[str, Any]:
    """Returns processor, memory, GPUs, kernel and versions as JSON types."""
    environment = run_child(describe_environment, None, timeout_s=120).value
    hardware = environment["hardware"]
    return {
        "cpu_model": hardware["cpu_model"],
        "cores": hardware["cores"],
        "memory_gib": round(hardware["memory_bytes"] / 2**30, 1),
        "gpus": [gpu["name"] for gpu in hardware["gpus"]],
        "system": environment["system"],
        "python": environment["python"],
        "onnxruntime": environment["onnxruntime"],
        "onnxruntime_build": environment["onnxruntime_build"],
        "packages": environment["packages"],
    }


def format_results(value: object, *, margin: str = "") -> str:
    """Returns JSON types as JSON text that a person compares by lines.

    Floats have six significant digits. An object or array that fits 200 characters is one line.
    """
    if isinstance(value, float):
        return f"{float(f'{value:.6g}'):g}" if abs(value) < 1e15 else json.dumps(value)
    if not isinstance(value, dict | list):
        return json.dumps(value)
    inner = f"{margin} "
    if isinstance(value, dict):
        begin, end = "{", "}"
        items = [f"{json.dumps(key)}: {format_results(item, margin=inner)}" for key, item in value.items()]
    else:
        begin, end = "[", "]"
        items = [format_results(item, margin=inner) for item in value]
    line = f"{begin}{', '.join(items)}{end}"
    if len(margin) + len(line) <= 200 and "\n" not in line:
        return line
    body = f",\n{inner}".join(items)
    return f"{begin}\n{inner}{body}\n{margin}{end}"
