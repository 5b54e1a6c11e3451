from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortprep.runtime.machine.hardware import (
    KERNEL_FEATURES,
    Gpu,
    Hardware,
    hardware_fingerprint,
    nchwc_block_size,
    parse_cpuinfo,
    read_gpus,
    read_hardware,
)

pytestmark = pytest.mark.runtime

AVX2 = ("avx", "avx2", "fma")


def machine(features: tuple[str, ...], name: str = "x86_64") -> Hardware:
    return Hardware(name, "", features, 1, 2**30)


def test_this_machine_is_read():
    here = read_hardware()
    assert here.machine == platform.machine()
    assert here.cores == len(os.sched_getaffinity(0))
    assert here.memory_bytes > 2**27
    assert list(here.cpu_features) == sorted(set(here.cpu_features))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 flags")
def test_the_processor_and_the_kernel_agree_on_this_machine():
    _, listed = parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    assert set(read_hardware(gpus=False).cpu_features) == set(listed)


UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


class OneGpu:
    """The CUDA driver of a machine with one GPU, which has a UUID and is zero in all else."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, _: Any) -> int:  # noqa: N802
        uuid[:] = bytes.fromhex(UUID.removeprefix("GPU-").replace("-", ""))
        return 0


def test_a_gpus_name_is_written_as_nvidia_writes_it(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: OneGpu())
    assert [gpu.uuid for gpu in read_gpus()] == [UUID]


class OldDriver:
    """The same machine with a driver of before CUDA 11.4."""

    def __getattr__(self, name: str) -> Any:
        if name == "cuDeviceGetUuid_v2":
            raise AttributeError(name)
        return getattr(OneGpu(), name.replace("cuDeviceGetUuid", "cuDeviceGetUuid_v2"))


def test_an_old_driver_names_its_gpu_too(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: OldDriver())
    assert [gpu.uuid for gpu in read_gpus()] == [UUID]


def test_x86_flags_are_parsed():
    first = "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz: fast\nflags\t\t: fpu avx avx2\n\n"
    name, flags = parse_cpuinfo(first + "processor\t: 1\nflags\t: x\n")
    assert name == "Some CPU @ 2.0GHz: fast"
    assert flags == {"fpu", "avx", "avx2"}


def test_arm_features_are_parsed():
    _, flags = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd i8mm\n")
    assert flags == {"fp", "asimd", "i8mm"}


def test_no_information_is_no_feature():
    assert parse_cpuinfo("") == ("", frozenset())


@pytest.mark.parametrize(
    ("features", "size"), [((), 1), (("sse4_2",), 1), (("avx",), 8), (AVX2, 8), ((*AVX2, "avx512f"), 16)]
)
def test_the_block_size_follows_the_instruction_set(features, size):
    assert nchwc_block_size(machine(features)) == size


def test_a_cpu_fingerprint_ignores_gpus_and_irrelevant_flags():
    plain = machine((*AVX2, "erms"))
    gpu = Gpu("H200", (9, 0), 1, "580", "13.0", "GPU-1")
    assert hardware_fingerprint("cpu", plain) == hardware_fingerprint(
        "cpu", dataclasses.replace(plain, cpu_features=AVX2, gpus=(gpu,), cpu_model="other")
    )


@pytest.mark.parametrize(
    "change",
    [{"name": "B200"}, {"compute_capability": (10, 0)}, {"driver_version": "590"}, {"cuda_version": "13.1"}],
)
def test_a_cuda_fingerprint_changes_with_gpu_and_driver(change):
    gpu = Gpu("H200", (9, 0), 1, "580", "13.0", "GPU-1")
    here = dataclasses.replace(machine(AVX2), gpus=(gpu,))
    there = dataclasses.replace(here, gpus=(dataclasses.replace(gpu, **change),))  # type: ignore[arg-type]
    assert hardware_fingerprint("cuda", here) != hardware_fingerprint("cuda", there)


def test_the_same_gpu_model_in_another_slot_is_the_same_hardware():
    gpu = Gpu("H200", (9, 0), 1, "580", "13.0", "GPU-1")
    here = dataclasses.replace(machine(AVX2), gpus=(gpu,))
    there = dataclasses.replace(here, gpus=(dataclasses.replace(gpu, uuid="GPU-2"),))
    assert hardware_fingerprint("cuda", here) == hardware_fingerprint("cuda", there)


def test_every_instruction_set_that_decides_the_block_size_is_in_the_fingerprint():
    assert {"avx", "avx2", "fma", "avx512f"} <= KERNEL_FEATURES


def test_a_gpu_is_read_whole_or_there_is_none():
    for gpu in read_gpus():
        assert gpu.name
        assert gpu.compute_capability >= (5, 0)
        assert gpu.memory_bytes > 2**28
        assert gpu.uuid.startswith("GPU-")
