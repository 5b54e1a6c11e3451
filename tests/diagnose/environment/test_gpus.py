from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortprep.diagnose.environment.facts.gpus import count_bus_gpus, read_driver_version, read_gpu_states
from ortprep.diagnose.environment.facts.records import PcieLink
from tests.diagnose.environment.builders import HOPPER

UNSUPPORTED = 3
WHOLE, SLICE = 7, 8


class ManagementLibrary:
    """NVML with one GPU, known by one identifier; each of its functions answers 0 or says why not."""

    def __init__(self, uuid: str, *, answers: dict[str, int], starts: bool = True) -> None:
        self.uuid, self.answers, self.starts, self.open = uuid, answers, starts, False

    def __getattr__(self, name: str) -> Callable[..., int]:
        functions: dict[str, Callable[..., int]] = {
            "nvmlInit_v2": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetHandleByUUID": self._find,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._whole,
            "nvmlDeviceGetMemoryInfo": self._memory,
        }
        return functions.get(name, functools.partial(self._number, name))

    def _init(self) -> int:
        self.open = self.starts
        return 0 if self.starts else 9

    def _shutdown(self) -> int:
        self.open = False
        return 0

    def _find(self, uuid: bytes, device: Any) -> int:
        if uuid.decode() != self.uuid:
            return 6
        device._obj.value = SLICE if self.uuid.startswith("MIG-") else WHOLE
        return 0

    def _whole(self, device: ctypes.c_void_p, whole: Any) -> int:
        if device.value != SLICE:
            return 2
        whole._obj.value = WHOLE
        return 0

    def _memory(self, device: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.free = 5
        return 0

    def _number(self, name: str, device: ctypes.c_void_p, number: Any) -> int:
        if device.value != WHOLE or name not in self.answers:
            return UNSUPPORTED
        number._obj.value = self.answers[name]
        return 0


ANSWERS = {
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
}


@pytest.mark.parametrize("uuid", ["GPU-0", "MIG-0"])
def test_a_gpu_and_a_slice_of_it_are_connected_alike(uuid: str) -> None:
    library = ManagementLibrary(uuid, answers=ANSWERS)
    (state,) = read_gpu_states([HOPPER], library)
    assert (state.free_bytes, state.persistence, state.link) == (5, False, PcieLink(1, 8, 5, 16))
    assert not library.open


def test_what_is_not_told_is_none_and_no_failure() -> None:
    (state,) = read_gpu_states([HOPPER], ManagementLibrary("GPU-0", answers={}))
    assert (state.persistence, state.link) == (None, None)


@pytest.mark.parametrize(
    "library",
    [
        ManagementLibrary("GPU-other", answers=ANSWERS),
        ManagementLibrary("GPU-0", answers=ANSWERS, starts=False),
    ],
)
def test_a_gpu_it_does_not_know_is_listed_all_the_same(library: ManagementLibrary) -> None:
    (state,) = read_gpu_states([HOPPER], library)
    assert state.device == HOPPER
    assert state.free_bytes is None


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
