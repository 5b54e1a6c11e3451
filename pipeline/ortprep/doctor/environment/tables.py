"""Facts as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from ortprep.doctor.diagnosis import format_bytes
from ortprep.doctor.environment.facts.records import Facts, GpuState, short_name
from ortprep.runtime.machine.hardware import KERNEL_FEATURES
from ortprep.tables import CellValue, Table


def build_tables(facts: Facts) -> tuple[Table, ...]:
    """Returns the tables of a machine; those that have no rows are left out."""
    tables = (
        Table("ONNX Runtime", ("what", "is"), tuple(_runtime_rows(facts))),
        Table(
            "Execution providers, each tried in a process of its own",
            ("provider", "usable", "why not"),
            tuple(_provider_rows(facts)),
        ),
        Table(
            "Libraries they compute with",
            ("library", "version", "loaded from", "package that brings it", "needed by"),
            tuple(_library_rows(facts)),
        ),
        Table(
            "GPUs",
            ("GPU", "memory, GB", "free, GB", "capability", "persistence", "PCIe now", "PCIe most"),
            tuple(_gpu_row(ordinal, state) for ordinal, state in enumerate(facts.gpus)),
        ),
        Table("Machine", ("what", "is"), tuple(_machine_rows(facts))),
    )
    return tuple(table for table in tables if table.rows)


def _runtime_rows(facts: Facts) -> Iterator[tuple[CellValue, ...]]:
    for wheel in facts.wheels:
        yield "wheel", str(wheel)
    runtime = facts.runtime
    if runtime.error is not None:
        yield "import", runtime.error
        return
    yield "version", f"{runtime.version} from {runtime.folder}"
    yield "build", runtime.build_info.removeprefix("ORT Build Info: ")
    if runtime.cuda_version:
        yield "built with CUDA", runtime.cuda_version
    if facts.gpus:
        device = facts.gpus[0].device
        yield "driver", f"{facts.driver or device.driver_version}, serves CUDA up to {device.cuda_version}"
    elif facts.driver:
        yield "driver", facts.driver
    yield from facts.variables.items()


def _provider_rows(facts: Facts) -> Iterator[tuple[CellValue, ...]]:
    for provider in facts.providers:
        yield short_name(provider.name), "yes" if provider.usable else "no", provider.reason or None


def _library_rows(facts: Facts) -> Iterator[tuple[CellValue, ...]]:
    for library in facts.libraries:
        needed_by = ", ".join(map(short_name, library.needed_by))
        place = library.file or ("missing" if library.error else None)
        yield library.name, library.version, place, library.package, needed_by


def _gpu_row(ordinal: int, state: GpuState) -> tuple[CellValue, ...]:
    device, link = state.device, state.link
    return (
        f"{ordinal} {device.name}",
        round(device.memory_bytes / 1e9, 1),
        None if state.free_bytes is None else round(state.free_bytes / 1e9, 1),
        ".".join(map(str, device.compute_capability)),
        None if state.persistence is None else "on" if state.persistence else "off",
        None if link is None else f"{link.generation}.0 x{link.width}",
        None if link is None else f"{link.max_generation}.0 x{link.max_width}",
    )


def _machine_rows(facts: Facts) -> Iterator[tuple[CellValue, ...]]:
    hardware, limits = facts.hardware, facts.limits
    yield "processor", hardware.cpu_model or hardware.machine
    yield "instruction sets", " ".join(flag for flag in hardware.cpu_features if flag in KERNEL_FEATURES)
    granted = "no limit" if limits.quota_cores is None else f"the time of {limits.quota_cores:.3g} granted"
    yield "cores", f"{hardware.cores} ({granted})"
    if limits.quota_cores is not None:
        yield "throttled periods", f"{limits.throttled_periods} of {limits.periods}"
    limit = limits.memory_bytes
    bounded = "no limit" if limit is None else f"{format_bytes(limit)} granted"
    yield "memory", f"{format_bytes(hardware.memory_bytes)} ({bounded})"
    for name, room in (("/dev/shm", facts.shared_memory), ("bundles", facts.artifacts)):
        free, total = format_bytes(room.free_bytes), format_bytes(room.total_bytes)
        yield name, f"{free} of {total} free: {room.path}"
