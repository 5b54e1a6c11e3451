"""`ortprep doctor env`: reads the machine and reports findings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.environment.facts.disk import read_disk_space
from ortprep.doctor.environment.facts.gpus import count_bus_gpus, read_driver_version, read_gpu_states
from ortprep.doctor.environment.facts.records import DiskSpace, Facts
from ortprep.doctor.environment.facts.runtime import add_packages, read_runtime, try_providers
from ortprep.doctor.environment.facts.wheels import read_wheels
from ortprep.doctor.environment.rules.findings import find, name_providers
from ortprep.doctor.environment.tables import build_tables
from ortprep.measuring.device_lock import working
from ortprep.runtime.machine.cgroups import read_limits
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.telemetry import TELEMETRY_VARIABLE

CHECK = "env"

_SHARED_MEMORY = Path("/dev/shm")
_ROOT = Path("/")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_HOME",
    "CUDA_PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    TELEMETRY_VARIABLE,
)
"""Environment variables that change which libraries are loaded, what is seen, compiled or sent."""


def diagnose_environment(
    *,
    artifacts: Path,
    expect: Sequence[str] = (),
    root: Path = _ROOT,
    shared_memory: Path = _SHARED_MEMORY,
) -> Diagnosis:
    """Returns what ONNX Runtime finds on this machine, and what it misses; takes a few seconds.

    It makes sessions, so it waits for measurements. It does not wait for builds, which may take hours where
    this is a container's start-up check.

    Args:
        artifacts: Folder of the bundles, there or not.
        expect: Execution providers that must work: `cuda`, or `CUDAExecutionProvider`.
        root: Folder in which `proc` and `sys` are.
        shared_memory: Where shared memory is kept.

    Raises:
        StageError: The folder of the device's lock cannot be trusted.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    with working():
        facts = read_facts(artifacts=artifacts, root=root, shared_memory=shared_memory)
    return describe(facts, expect=expect)


def describe(facts: Facts, *, expect: Sequence[str] = ()) -> Diagnosis:
    """Returns the diagnosis of facts that were read here or elsewhere."""
    findings = find(facts, expected=name_providers(expect))
    return diagnose(CHECK, findings, tables=build_tables(facts), figures=encode(facts))


def read_facts(*, artifacts: Path, root: Path = _ROOT, shared_memory: Path = _SHARED_MEMORY) -> Facts:
    """Reads everything the rules judge; see `diagnose_environment` for the arguments.

    Raises:
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    hardware = read_hardware()
    runtime, libraries = read_runtime()
    has_shared_memory = shared_memory.is_dir()
    return Facts(
        wheels=read_wheels(),
        runtime=runtime,
        providers=try_providers(runtime.available),
        libraries=add_packages(libraries, runtime.cuda_version),
        gpus=read_gpu_states(hardware.gpus),
        bus_gpus=count_bus_gpus(root / "sys"),
        driver=read_driver_version(root / "sys"),
        hardware=replace(hardware, gpus=()),
        limits=read_limits(root),
        shared_memory=read_disk_space(shared_memory) if has_shared_memory else DiskSpace("/dev/shm", 0, 0),
        artifacts=read_disk_space(artifacts.absolute()),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )
