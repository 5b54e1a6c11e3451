"""`doctor env`: reads the machine, and shows every topic as a table with what is found of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.environment import machine, runtime
from ortprep.doctor.environment.facts import Facts, read_facts
from ortprep.measuring.device_lock import working
from ortprep.tables import Table

_TOPICS = (
    runtime.find_in_installation,
    runtime.find_usage_data,
    runtime.find_in_providers,
    machine.find_missing_gpus,
    machine.find_in_gpus,
    machine.find_in_processor,
    machine.find_in_memory,
)

_SPELLINGS = {
    spelling.lower(): spelling
    for spelling in ("CPU", "CUDA", "NvTensorRTRTX", "OpenVINO", "ROCM", "MIGraphX", "QNN", "WebGpu")
}


def diagnose_environment(*, artifacts: Path, expect: Sequence[str] = ()) -> Diagnosis:
    """Returns what ONNX Runtime finds on this machine, and what it misses; takes a few seconds.

    It makes sessions, so it waits for measurements. It does not wait for builds, which may take hours where
    this is a container's start-up check.

    Args:
        artifacts: Folder of the bundles, there or not.
        expect: Execution providers that must work: `cuda`, or `CUDAExecutionProvider`.

    Raises:
        StageError: The folder of the device's lock cannot be trusted.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    with working():
        facts = read_facts(artifacts=artifacts, expected=name_providers(expect))
    return describe(facts)


def describe(facts: Facts) -> Diagnosis:
    """Returns the diagnosis of facts that were read here or elsewhere. Pure."""
    tried = "Execution providers, each tried in a process of its own"
    gpu_columns = ("GPU", "memory, GB", "capability")
    tables = (
        Table("ONNX Runtime", ("what", "is"), tuple(runtime.runtime_rows(facts))),
        Table(tried, ("provider", "usable", "why not"), tuple(runtime.provider_rows(facts))),
        Table("CUDA's libraries", ("library", "loaded from"), tuple(runtime.library_rows(facts))),
        Table("GPUs", gpu_columns, tuple(machine.gpu_rows(facts))),
        Table("Machine", ("what", "is"), tuple(machine.machine_rows(facts))),
    )
    findings = [finding for topic in _TOPICS for finding in topic(facts)]
    return diagnose("env", findings, tables=tables, figures=encode(facts))


def name_providers(names: Sequence[str]) -> tuple[str, ...]:
    """Returns full names of providers: `cuda` is `CUDAExecutionProvider`."""
    shorts = (name.lower().removesuffix("executionprovider") for name in names)
    return tuple(dict.fromkeys(f"{_SPELLINGS.get(one, one.capitalize())}ExecutionProvider" for one in shorts))
