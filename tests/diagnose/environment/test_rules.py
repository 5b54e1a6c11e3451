from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.diagnose.diagnosis import Finding, Severity
from pipeline.diagnose.environment import rules
from pipeline.diagnose.environment.codes import CODES
from pipeline.diagnose.environment.facts import (
    Architecture,
    DeviceCode,
    Facts,
    GpuState,
    Library,
    PcieLink,
    Provider,
    Room,
    Runtime,
    Wheel,
)
from pipeline.diagnose.environment.rules import find, name_providers
from pipeline.runtime.loading.session import CPU, CUDA
from tests.diagnose.environment.planting import GB, HEALTHY, HOPPER, SITE, WITHOUT_GPU, codes, one

TENSORRT = "TensorrtExecutionProvider"


@dataclass(frozen=True)
class Plant:
    """Something that is wrong with a machine, and how it is to be called."""

    code: str
    severity: Severity
    facts: Facts
    expected: tuple[str, ...] = ()


def _gpu(**changes: object) -> Facts:
    return replace(HEALTHY, gpus=(replace(HEALTHY.gpus[0], **changes),))  # type: ignore[arg-type]


def _capability(major: int, minor: int) -> tuple[GpuState, ...]:
    return (replace(HEALTHY.gpus[0], device=replace(HOPPER, compute_capability=(major, minor))),)


def _limits(**changes: object) -> Facts:
    return replace(HEALTHY, limits=replace(HEALTHY.limits, **changes))  # type: ignore[arg-type]


def _reading(**changes: object) -> Facts:
    assert HEALTHY.reading is not None
    return replace(HEALTHY, reading=replace(HEALTHY.reading, **changes))  # type: ignore[arg-type]


def _imported(**changes: object) -> Facts:
    return replace(HEALTHY, runtime=replace(HEALTHY.runtime, **changes))  # type: ignore[arg-type]


BOTH = (Wheel("onnxruntime", "1.31.1", SITE), Wheel("onnxruntime-gpu", "1.31.1", SITE))
BROKEN = Runtime(error="ImportError: no module named onnxruntime.capi")
MISSING = Library("libcudnn.so.9", (), (CUDA,), "nvidia-cudnn-cu13~=9.0", error="libcudnn.so.9: cannot open")
NO_CUDA = replace(WITHOUT_GPU, runtime=replace(HEALTHY.runtime, package="onnxruntime", available=(CPU,)))
UNUSABLE = (Provider(CUDA, usable=False, reason="CUDA failure 100"), Provider(CPU, usable=True))
MEBIBYTE = 1024 * 1024

PLANTS = (
    Plant("no-onnxruntime", "problem", replace(HEALTHY, wheels=(), runtime=BROKEN, providers=())),
    Plant("onnxruntime-broken", "problem", replace(HEALTHY, runtime=BROKEN, providers=())),
    Plant("both-wheels-installed", "problem", replace(HEALTHY, wheels=BOTH)),
    Plant(
        "onnxruntime-shadowed",
        "advice",
        replace(HEALTHY, wheels=(*HEALTHY.wheels, Wheel("onnxruntime", "1.30.0", "/usr/lib/python3"))),
    ),
    Plant("onnxruntime-version-differs", "problem", _imported(version="1.30.0")),
    Plant("onnxruntime-too-old", "problem", _imported(version="1.22.1")),
    Plant("usage-data-off", "good", HEALTHY),
    Plant("usage-data-off", "good", replace(HEALTHY, variables={"ORT_DISABLE_TELEMETRY": "true"})),
    Plant("usage-data-sent", "advice", replace(HEALTHY, variables={"ORT_DISABLE_TELEMETRY": "0"})),
    Plant("provider-usable", "good", HEALTHY),
    Plant("provider-unusable", "problem", replace(HEALTHY, providers=UNUSABLE)),
    Plant("provider-unusable", "note", WITHOUT_GPU),
    Plant("provider-unusable", "problem", WITHOUT_GPU, (CUDA,)),
    Plant("provider-not-in-wheel", "problem", NO_CUDA, (CUDA,)),
    Plant("missing-library", "problem", replace(HEALTHY, libraries=(MISSING,))),
    Plant("missing-library", "note", replace(WITHOUT_GPU, libraries=(MISSING,))),
    Plant("missing-library", "problem", replace(WITHOUT_GPU, libraries=(MISSING,)), (CUDA,)),
    Plant("no-gpu", "problem", WITHOUT_GPU, (CUDA,)),
    Plant("gpu-unused", "advice", replace(NO_CUDA, gpus=HEALTHY.gpus, bus_gpus=1)),
    Plant("gpu-without-driver", "problem", replace(WITHOUT_GPU, bus_gpus=2)),
    Plant("gpus-hidden", "note", replace(HEALTHY, bus_gpus=8, variables={"CUDA_VISIBLE_DEVICES": "0"})),
    Plant(
        "gpus-hidden",
        "problem",
        replace(WITHOUT_GPU, bus_gpus=8, variables={"CUDA_VISIBLE_DEVICES": ""}),
        (CUDA,),
    ),
    Plant("driver-too-old", "problem", _gpu(device=replace(HOPPER, cuda_version="12.8"))),
    Plant("native-code", "good", HEALTHY),
    Plant(
        "compiles-at-start",
        "advice",
        replace(
            HEALTHY,
            gpus=_capability(10, 0),
            device_code=DeviceCode("", (Architecture(9, 0, True),), (Architecture(9, 0),)),
        ),
    ),
    Plant("compiles-at-start", "advice", replace(HEALTHY, variables={"CUDA_FORCE_PTX_JIT": "1"})),
    Plant("no-code-for-gpu", "problem", replace(HEALTHY, gpus=_capability(10, 0), providers=UNUSABLE)),
    Plant("no-code-for-gpu", "advice", replace(HEALTHY, gpus=_capability(10, 0))),
    Plant("eager-module-loading", "advice", replace(HEALTHY, variables={"CUDA_MODULE_LOADING": "eager"})),
    Plant("gpu-persistence-off", "advice", _gpu(persistence=False)),
    Plant("pcie-link-degraded", "advice", _gpu(link=PcieLink(5, 8, 5, 16))),
    Plant("pcie-link-degraded", "note", _gpu(link=PcieLink(1, 16, 5, 16))),
    Plant("no-avx2", "advice", replace(HEALTHY, processor=replace(HEALTHY.processor, features=("avx",)))),
    Plant(
        "no-avx512",
        "note",
        replace(HEALTHY, processor=replace(HEALTHY.processor, features=("avx", "avx2", "fma"))),
    ),
    Plant("cores-above-quota", "advice", _limits(quota_cores=2.5)),
    Plant("cpu-throttled", "advice", _limits(quota_cores=8.0, periods=100, throttled_periods=40)),
    Plant("cpu-throttled", "note", _limits(quota_cores=8.0, periods=1000, throttled_periods=1)),
    Plant("memory-limited", "advice", _limits(memory_limit_bytes=512 * MEBIBYTE)),
    Plant("no-shared-memory", "problem", replace(HEALTHY, shared_memory=None)),
    Plant(
        "small-shared-memory",
        "problem",
        replace(HEALTHY, shared_memory=Room("/dev/shm", "tmpfs", 64 * MEBIBYTE, 64 * MEBIBYTE)),
    ),
    Plant(
        "small-shared-memory",
        "problem",
        replace(HEALTHY, shared_memory=Room("/dev/shm", "tmpfs", 8 * GB, MEBIBYTE)),
    ),
    Plant("slow-disk", "advice", _reading(cold_bytes_per_s=90e6)),
    Plant("disk-not-measured", "note", _reading(cold_bytes_per_s=None, obstacle="it lives in memory")),
    Plant("disk-not-measured", "note", replace(HEALTHY, reading=None)),
    Plant("low-space", "problem", replace(HEALTHY, artifacts=Room("/srv", "ext4", 9 * GB, GB // 2))),
    Plant("low-space", "advice", replace(HEALTHY, artifacts=Room("/srv", "ext4", 9 * GB, 3 * GB))),
)


def _written_codes() -> Iterator[str]:
    """The codes of every `Finding(…)` in the rules."""
    for file in Path(rules.__file__).parent.glob("*rules.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                assert isinstance(node.args[0], ast.Constant)
                yield str(node.args[0].value)


def _planted(plant: Plant) -> list[Finding]:
    findings = find(plant.facts, expected=plant.expected)
    return [
        finding for finding in findings if (finding.code, finding.severity) == (plant.code, plant.severity)
    ]


def test_every_code_is_written_somewhere_listed_and_planted() -> None:
    assert set(_written_codes()) == set(CODES) == {plant.code for plant in PLANTS}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.code}-{plant.severity}")
def test_what_is_planted_is_found_with_its_severity(plant: Plant) -> None:
    assert _planted(plant)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.code}-{plant.severity}")
def test_what_can_be_mended_says_how(plant: Plant) -> None:
    for finding in find(plant.facts, expected=plant.expected):
        assert finding.severity in ("good", "note") or finding.hint


def test_nothing_but_good_is_found_where_nothing_is_wrong() -> None:
    assert {finding.severity for finding in find(HEALTHY, expected=(CUDA, CPU))} == {"good"}


def test_a_machine_without_gpu_has_no_problem_with_a_wheel_that_knows_cuda() -> None:
    assert "problem" not in {finding.severity for finding in find(WITHOUT_GPU)}


def test_the_hint_for_both_wheels_removes_both_and_installs_one() -> None:
    found = one(find(replace(HEALTHY, wheels=BOTH)), "both-wheels-installed")
    assert found.hint == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"


def test_wheels_in_different_folders_do_not_own_the_same_files() -> None:
    apart = (Wheel("onnxruntime", "1.31.1", "/one"), Wheel("onnxruntime-gpu", "1.31.1", "/two"))
    found = codes(find(replace(HEALTHY, wheels=apart)))
    assert "onnxruntime-shadowed" in found
    assert "both-wheels-installed" not in found


def test_libraries_of_one_package_are_one_finding_that_names_it() -> None:
    names = ("libcublas.so.13", "libcublasLt.so.13")
    libraries = tuple(Library(name, (CUDA,), (), "nvidia-cublas==13.*", error="no") for name in names)
    found = one(find(replace(HEALTHY, libraries=libraries)), "missing-library")
    assert all(name in found.text for name in names)
    assert found.hint == "pip install 'nvidia-cublas==13.*'"


def test_cudnn_is_missed_by_cuda_though_only_tensorrt_links_to_it() -> None:
    cudnn = replace(MISSING, linked_by=(TENSORRT,))
    assert one(find(replace(HEALTHY, libraries=(cudnn,))), "missing-library").severity == "problem"
    assert (
        one(find(replace(HEALTHY, libraries=(replace(cudnn, opened_by=()),))), "missing-library").severity
        == "note"
    )


def test_a_missing_driver_is_not_called_a_missing_package() -> None:
    driver = Library("libcuda.so.1", (CUDA,), error="libcuda.so.1: cannot open")
    found = codes(find(replace(WITHOUT_GPU, bus_gpus=1, libraries=(driver,))))
    assert "gpu-without-driver" in found
    assert "missing-library" not in found


def test_a_newer_driver_serves_an_older_cuda() -> None:
    newer = replace(HEALTHY.gpus[0], device=replace(HOPPER, cuda_version="14.1"))
    assert "driver-too-old" not in codes(find(replace(HEALTHY, gpus=(newer,))))


def test_a_driver_of_the_same_major_version_serves_a_newer_minor_one() -> None:
    facts = _imported(cuda_version="13.2")
    assert "driver-too-old" not in codes(find(facts))


def test_as_many_cores_as_the_quota_rounds_up_to_are_not_too_many() -> None:
    assert "cores-above-quota" not in codes(find(_limits(cores=3, quota_cores=2.5)))


def test_processors_that_are_not_x86_are_not_asked_for_avx() -> None:
    arm = replace(HEALTHY.processor, machine="aarch64", features=("asimd",))
    assert not codes(find(replace(HEALTHY, processor=arm))) & {"no-avx2", "no-avx512"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("cuda", CUDA),
        ("CPU", CPU),
        ("tensorrt", TENSORRT),
        ("CUDAExecutionProvider", CUDA),
        ("something", "SomethingExecutionProvider"),
    ],
)
def test_providers_are_asked_for_by_short_names(asked: str, named: str) -> None:
    assert name_providers([asked, asked]) == (named,)
