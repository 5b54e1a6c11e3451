from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ortprep.doctor.diagnosis import Finding, Severity
from ortprep.doctor.environment.facts.records import (
    DiskSpace,
    Facts,
    GpuState,
    InstalledRuntime,
    Library,
    Provider,
    Wheel,
)
from ortprep.doctor.environment.rules import findings
from ortprep.doctor.environment.rules.findings import find, name_providers
from ortprep.runtime.loading.session import CPU, CUDA
from tests.doctor.environment.builders import (
    GB,
    HEALTHY,
    HOPPER,
    WITHOUT_GPU,
    codes,
    documented_codes,
    one,
)

TENSORRT = "TensorrtExecutionProvider"


@dataclass(frozen=True)
class FactsCase:
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


def _imported(**changes: object) -> Facts:
    return replace(HEALTHY, runtime=replace(HEALTHY.runtime, **changes))  # type: ignore[arg-type]


BOTH = (Wheel("onnxruntime", "1.31.1"), Wheel("onnxruntime-gpu", "1.31.1"))
BROKEN = InstalledRuntime(error="ImportError: no module named onnxruntime.capi")
MISSING = Library("libcudnn.so.9", (CUDA,), "nvidia-cudnn-cu13==9.*", error="libcudnn.so.9: cannot open")
NO_CUDA = replace(WITHOUT_GPU, runtime=replace(HEALTHY.runtime, package="onnxruntime", available=(CPU,)))
UNUSABLE = (Provider(CUDA, usable=False, reason="CUDA failure 100"), Provider(CPU, usable=True))
MEBIBYTE = 1024 * 1024

CASES = (
    FactsCase("no-onnxruntime", "problem", replace(HEALTHY, wheels=(), runtime=BROKEN, providers=())),
    FactsCase("onnxruntime-broken", "problem", replace(HEALTHY, runtime=BROKEN, providers=())),
    FactsCase("both-wheels-installed", "problem", replace(HEALTHY, wheels=BOTH)),
    FactsCase("onnxruntime-version-differs", "problem", _imported(version="1.30.0")),
    FactsCase("onnxruntime-too-old", "problem", _imported(version="1.22.1")),
    FactsCase("usage-data-off", "ok", HEALTHY),
    FactsCase("usage-data-off", "ok", replace(HEALTHY, variables={"ORT_DISABLE_TELEMETRY": "true"})),
    FactsCase("usage-data-sent", "advice", replace(HEALTHY, variables={"ORT_DISABLE_TELEMETRY": "0"})),
    FactsCase("provider-usable", "ok", HEALTHY),
    FactsCase("provider-unusable", "problem", replace(HEALTHY, providers=UNUSABLE)),
    FactsCase("provider-unusable", "note", WITHOUT_GPU),
    FactsCase("provider-unusable", "problem", WITHOUT_GPU, (CUDA,)),
    FactsCase("provider-not-in-wheel", "problem", NO_CUDA, (CUDA,)),
    FactsCase("missing-library", "problem", replace(HEALTHY, libraries=(MISSING,))),
    FactsCase(
        "missing-library",
        "note",
        replace(HEALTHY, libraries=(replace(MISSING, needed_by=(TENSORRT,)),)),
    ),
    FactsCase("missing-library", "problem", replace(WITHOUT_GPU, libraries=(MISSING,)), (CUDA,)),
    FactsCase("no-gpu", "problem", WITHOUT_GPU, (CUDA,)),
    FactsCase("gpu-unused", "advice", replace(NO_CUDA, gpus=HEALTHY.gpus, bus_gpus=1)),
    FactsCase("gpu-without-driver", "problem", replace(WITHOUT_GPU, bus_gpus=2)),
    FactsCase("gpus-hidden", "note", replace(HEALTHY, bus_gpus=8, variables={"CUDA_VISIBLE_DEVICES": "0"})),
    FactsCase(
        "gpus-hidden",
        "problem",
        replace(WITHOUT_GPU, bus_gpus=8, variables={"CUDA_VISIBLE_DEVICES": ""}),
        (CUDA,),
    ),
    FactsCase("driver-too-old", "problem", _gpu(device=replace(HOPPER, cuda_version="12.8"))),
    FactsCase("eager-module-loading", "advice", replace(HEALTHY, variables={"CUDA_MODULE_LOADING": "eager"})),
    FactsCase("gpu-persistence-off", "advice", _gpu(persistence=False)),
    FactsCase(
        "no-avx2", "advice", replace(HEALTHY, hardware=replace(HEALTHY.hardware, cpu_features=("avx",)))
    ),
    FactsCase("cores-above-quota", "advice", _limits(quota_cores=2.5)),
    FactsCase("cpu-throttled", "advice", _limits(quota_cores=8.0, periods=100, throttled_periods=40)),
    FactsCase("cpu-throttled", "note", _limits(quota_cores=8.0, periods=1000, throttled_periods=1)),
    FactsCase("memory-limited", "advice", _limits(memory_bytes=512 * MEBIBYTE)),
    FactsCase(
        "small-shared-memory",
        "advice",
        replace(HEALTHY, shared_memory=DiskSpace("/dev/shm", 64 * MEBIBYTE, 64 * MEBIBYTE)),
    ),
    FactsCase(
        "small-shared-memory",
        "advice",
        replace(HEALTHY, shared_memory=DiskSpace("/dev/shm", 0, 0)),
    ),
    FactsCase("low-space", "problem", replace(HEALTHY, artifacts=DiskSpace("/srv", 9 * GB, GB // 2))),
    FactsCase("low-space", "advice", replace(HEALTHY, artifacts=DiskSpace("/srv", 9 * GB, 3 * GB))),
)


def _written_codes() -> Iterator[str]:
    """The codes of every `Finding(…)` in the rules."""
    for file in Path(findings.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                assert isinstance(node.args[0], ast.Constant)
                yield str(node.args[0].value)


def _findings_like(case: FactsCase) -> list[Finding]:
    findings = find(case.facts, expected=case.expected)
    return [finding for finding in findings if (finding.code, finding.severity) == (case.code, case.severity)]


def test_every_code_is_written_somewhere_documented_and_tested() -> None:
    assert set(_written_codes()) == set(documented_codes()) == {case.code for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_every_case_is_found_with_its_severity(case: FactsCase) -> None:
    assert _findings_like(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_what_can_be_mended_says_how(case: FactsCase) -> None:
    for finding in find(case.facts, expected=case.expected):
        assert finding.severity in ("ok", "note") or finding.hint


def test_nothing_but_good_is_found_where_nothing_is_wrong() -> None:
    assert {finding.severity for finding in find(HEALTHY, expected=(CUDA, CPU))} == {"ok"}


def test_a_machine_without_gpu_has_no_problem_with_a_wheel_that_knows_cuda() -> None:
    assert "problem" not in {finding.severity for finding in find(WITHOUT_GPU)}


def test_the_hint_for_both_wheels_removes_both_and_installs_one() -> None:
    found = one(find(replace(HEALTHY, wheels=BOTH)), "both-wheels-installed")
    assert found.hint == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"


def test_libraries_of_one_package_are_one_finding_that_names_it() -> None:
    names = ("libcublas.so.13", "libcublasLt.so.13")
    libraries = tuple(Library(name, (CUDA,), "nvidia-cublas==13.*", error="no") for name in names)
    found = one(find(replace(HEALTHY, libraries=libraries)), "missing-library")
    assert all(name in found.text for name in names)
    assert found.hint == "pip install 'nvidia-cublas==13.*'"


def test_cudnn_is_missed_by_cuda_too() -> None:
    for users, severity in (((TENSORRT, CUDA), "problem"), ((TENSORRT,), "note")):
        library = replace(MISSING, needed_by=users)
        found = one(find(replace(HEALTHY, libraries=(library,))), "missing-library")
        assert found.severity == severity


def test_a_machine_without_a_gpu_is_not_told_to_install_libraries_of_cuda_unless_it_is_asked_for() -> None:
    facts = replace(WITHOUT_GPU, libraries=(MISSING,))
    assert "missing-library" not in codes(find(facts))
    assert one(find(facts, expected=(CUDA,)), "missing-library").severity == "problem"


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
    assert "cores-above-quota" not in codes(
        find(replace(_limits(quota_cores=2.5), hardware=replace(HEALTHY.hardware, cores=3)))
    )


def test_processors_that_are_not_x86_are_not_asked_for_avx() -> None:
    arm = replace(HEALTHY.hardware, machine="aarch64", cpu_features=("asimd",))
    assert "no-avx2" not in codes(find(replace(HEALTHY, hardware=arm)))


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
