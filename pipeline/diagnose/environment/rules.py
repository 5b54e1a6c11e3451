"""From facts to findings; nothing is read or measured here."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.diagnose.diagnosis import Finding
from pipeline.diagnose.environment import gpu_rules, machine_rules, runtime_rules
from pipeline.diagnose.environment.facts import Facts


def find(facts: Facts, *, expected: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Returns everything that is to be said of a machine.

    Args:
        facts: What was read of it.
        expected: Full names of the execution providers that were asked for: without them it is a problem.
    """
    return (
        *runtime_rules.find_of_wheels(facts),
        *runtime_rules.find_of_telemetry(facts),
        *runtime_rules.find_of_providers(facts, expected),
        *gpu_rules.find_of_access(facts, expected),
        *gpu_rules.find_of_driver(facts),
        *runtime_rules.find_of_libraries(facts, expected),
        *gpu_rules.find_of_code(facts),
        *gpu_rules.find_of_state(facts),
        *machine_rules.find_of_processor(facts),
        *machine_rules.find_of_limits(facts),
        *machine_rules.find_of_shared_memory(facts),
        *machine_rules.find_of_disk(facts),
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
