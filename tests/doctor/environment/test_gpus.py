from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ortprep.doctor.environment.facts.gpus import count_bus_gpus, read_driver_version, read_gpu_states
from ortprep.doctor.environment.facts.records import GpuState, PcieLink
from tests.doctor.environment.builders import HOPPER


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes an `nvidia-smi` that prints a text."""

    def write(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def test_a_gpu_s_memory_persistence_and_link_are_read(plant: Callable[[str], None]) -> None:
    plant("GPU-1, 7, Enabled, 4, 16, 4, 16\nGPU-0, 5, Disabled, 1, 8, 5, 16")
    (state,) = read_gpu_states([HOPPER])
    assert (state.free_bytes, state.persistence, state.link) == (5 * 2**20, False, PcieLink(1, 8, 5, 16))


def test_what_is_not_told_is_none_and_no_failure(plant: Callable[[str], None]) -> None:
    plant("GPU-0, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]")
    assert read_gpu_states([HOPPER]) == (GpuState(HOPPER),)
    plant("GPU-other, 5, Disabled, 1, 8, 5, 16\nNo devices were found")
    assert read_gpu_states([HOPPER]) == (GpuState(HOPPER),)


def _plant_device(sys: Path, name: str, vendor: str, kind: str) -> None:
    folder = sys / "bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n", encoding="ascii")
    (folder / "class").write_text(f"{kind}\n", encoding="ascii")


def test_gpus_are_counted_on_the_bus_and_their_sound_devices_are_not(tmp_path: Path) -> None:
    _plant_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    _plant_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")
    _plant_device(tmp_path, "0000:02:00.0", "0x10de", "0x030000")
    _plant_device(tmp_path, "0000:03:00.0", "0x8086", "0x030000")
    assert count_bus_gpus(tmp_path) == 2


def test_a_machine_without_bus_or_driver_has_neither(tmp_path: Path) -> None:
    assert count_bus_gpus(tmp_path) == 0
    assert read_driver_version(tmp_path) == ""
