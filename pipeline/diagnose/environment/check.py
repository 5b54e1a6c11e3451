"""`ortprep doctor env`: reads the machine and reports findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.diagnose.diagnosis import Diagnosis, diagnose
from ortprep.diagnose.environment.facts.cgroups import read_limits
from ortprep.diagnose.environment.facts.device_code import read_device_code
from ortprep.diagnose.environment.facts.disk import measure_reading
from ortprep.diagnose.environment.facts.gpus import count_bus_gpus, read_driver_version, read_gpu_states
from ortprep.diagnose.environment.facts.machine import describe_processor, read_disk_space, read_variables
from ortprep.diagnose.environment.facts.records import DeviceCode, DiskSpace, Facts, InstalledRuntime
from ortprep.diagnose.environment.facts.runtime import add_packages, read_runtime, try_providers
from ortprep.diagnose.environment.facts.wheels import read_requirements, read_wheels
from ortprep.diagnose.environment.rules.findings import find, name_providers
from ortprep.diagnose.environment.tables import build_tables
from ortprep.measuring.device_lock import working
from ortprep.runtime.machine.hardware import read_hardware

CHECK = "env"

_CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
_SHARED_MEMORY = Path("/dev/shm")
_ROOT = Path("/")


def diagnose_environment(
    *,
    artifacts: Path,
    expect: Sequence[str] = (),
    root: Path = _ROOT,
    shared_memory: Path = _SHARED_MEMORY,
) -> Diagnosis:
    """Returns what ONNX Runtime finds on this machine, and what it misses; takes a few seconds.

    It makes sessions and reads from the disk, so it waits for measurements. It does not wait for builds,
    which may take hours where this is a container's start-up check: beside one a disk looks slow.

    Args:
        artifacts: Folder of the bundles, there or not: its disk is measured.
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
    wheels = read_wheels()
    requirements = [text for wheel in wheels for text in read_requirements(wheel.name)]
    folder = artifacts.absolute()
    return Facts(
        wheels=wheels,
        runtime=runtime,
        providers=try_providers(runtime.available),
        libraries=add_packages(libraries, runtime.cuda_version, requirements),
        gpus=read_gpu_states(hardware.gpus),
        bus_gpus=count_bus_gpus(root / "sys"),
        driver=read_driver_version(root / "sys"),
        device_code=_read_code(runtime),
        processor=describe_processor(hardware),
        limits=read_limits(hardware, root),
        shared_memory=read_disk_space(shared_memory, root) if shared_memory.is_dir() else None,
        artifacts=read_disk_space(folder, root) or DiskSpace(str(folder), "", 0, 0),
        reading=measure_reading(folder),
        variables=read_variables(),
    )


def _read_code(runtime: InstalledRuntime) -> DeviceCode | None:
    return read_device_code(Path(runtime.folder) / "capi" / _CUDA_LIBRARY) if runtime.folder else None
