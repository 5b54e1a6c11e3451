"""All findings about a machine, from facts; nothing is read or measured here."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.diagnose.diagnosis import Finding
from ortprep.diagnose.environment.facts.records import Facts
from ortprep.diagnose.environment.rules import gpu, machine, runtime


def find(facts: Facts, *, expected: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Returns all findings about a machine.

    Args:
        facts: What was read of it.
        expected: Full names of the execution providers that were asked for: without them it is a problem.
    """
    return (
        *runtime.check_wheels(facts),
        *runtime.check_telemetry(facts),
        *runtime.check_providers(facts, expected),
        *gpu.check_access(facts, expected),
        *gpu.check_driver(facts),
        *runtime.check_libraries(facts, expected),
        *gpu.check_code(facts),
        *gpu.check_state(facts),
        *machine.check_processor(facts),
        *machine.check_limits(facts),
        *machine.check_shared_memory(facts),
        *machine.check_disk(facts),
    )


def name_providers(asked: Sequence[str]) -> tuple[str, ...]:
    """Returns full names of providers: `cuda` is `CUDAExecutionProvider`.

    A name this version does not know is taken with its first letter in upper case, as most are written.
    """
    return tuple(dict.fromkeys(_name_provider(name) for name in asked))


_SPELLINGS = (
    "CPU",
    "CUDA",
    "Tensorrt",
    "NvTensorRTRTX",
    "OpenVINO",
    "ROCM",
    "MIGraphX",
    "Dnnl",
    "ACL",
    "ArmNN",
    "QNN",
    "VitisAI",
    "CANN",
    "WebGpu",
    "Xnnpack",
)


def _name_provider(name: str) -> str:
    short = name.lower().removesuffix("executionprovider")
    spelling = next((known for known in _SPELLINGS if known.lower() == short), short.capitalize())
    return f"{spelling}ExecutionProvider"
