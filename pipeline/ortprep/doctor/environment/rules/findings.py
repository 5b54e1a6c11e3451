"""All findings about a machine, from facts; nothing is read or measured here."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.environment.facts.records import Facts
from ortprep.doctor.environment.rules import gpu, machine, runtime


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
        *gpu.check_state(facts),
        *machine.check_processor(facts),
        *machine.check_limits(facts),
        *machine.check_shared_memory(facts),
        *machine.check_disk(facts),
    )


def name_providers(names: Sequence[str]) -> tuple[str, ...]:
    """Returns full names of providers: `cuda` is `CUDAExecutionProvider`."""
    shorts = (name.lower().removesuffix("executionprovider") for name in names)
    return tuple(dict.fromkeys(f"{_SPELLINGS.get(one, one.capitalize())}ExecutionProvider" for one in shorts))


_SPELLINGS = {
    spelling.lower(): spelling
    for spelling in ("CPU", "CUDA", "NvTensorRTRTX", "OpenVINO", "ROCM", "MIGraphX", "QNN", "WebGpu")
}
