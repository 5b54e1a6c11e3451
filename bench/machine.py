"""Describes the machine and the versions of a result, without names of hosts or people."""

from __future__ import annotations

from typing import Any

from ortprep.children.child import run_child


def describe_machine() -> dict[str, Any]:
    """Returns processor, memory, GPUs, kernel and versions as JSON types."""
    environment = run_child("ortprep.stages.core.provenance:describe_environment", {}, timeout_s=120).value
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
