"""State of the GPUs, as `nvidia-smi` and the kernel say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortprep.doctor.environment.facts.records import GpuState, PcieLink
from ortprep.runtime.machine.cores import read_text
from ortprep.runtime.machine.hardware import Gpu

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; the same card's sound device is neither
_LINK = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max", "pcie.link.width.max")
_FIELDS = ("uuid", "memory.free", "persistence_mode", *_LINK)
_TIMEOUT_S = 60.0


def read_gpu_states(gpus: Sequence[Gpu]) -> tuple[GpuState, ...]:
    """Returns CUDA devices with their memory, persistence mode and PCIe link, as far as they are told."""
    rows = _query() if gpus else {}
    return tuple(_parse_state(gpu, rows.get(gpu.uuid, {})) for gpu in gpus)


def _query() -> Mapping[str, Mapping[str, str]]:
    """Returns the fields of every GPU by its UUID; nothing without `nvidia-smi`."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = ([field.strip() for field in line.split(",")] for line in done.stdout.splitlines())
    return {row[0]: dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)}


def _parse_state(gpu: Gpu, row: Mapping[str, str]) -> GpuState:
    free_mib, mode = row.get("memory.free", ""), row.get("persistence_mode", "")
    link = [row.get(field, "") for field in _LINK]
    return GpuState(
        device=gpu,
        free_bytes=int(free_mib) * 2**20 if free_mib.isdigit() else None,
        persistence={"Enabled": True, "Disabled": False}.get(mode),
        link=PcieLink(*map(int, link)) if all(number.isdigit() for number in link) else None,
    )


def count_bus_gpus(sys: Path = Path("/sys")) -> int:
    """Returns how many NVIDIA GPUs the kernel sees on the PCI bus, with a driver or without."""
    devices = sys / "bus/pci/devices"
    folders = devices.iterdir() if devices.is_dir() else ()
    return sum(
        read_text(f"{folder}/vendor") == _NVIDIA and read_text(f"{folder}/class").startswith(_DISPLAY_CLASSES)
        for folder in folders
    )


def read_driver_version(sys: Path = Path("/sys")) -> str:
    """Returns the version of NVIDIA's kernel driver, "" if none is loaded."""
    return read_text(f"{sys}/module/nvidia/version")
