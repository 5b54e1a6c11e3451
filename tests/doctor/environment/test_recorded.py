"""What several versions of ONNX Runtime really said, on a machine without CUDA's libraries."""

from __future__ import annotations

import pytest

from ortprep.doctor.environment.check import describe
from ortprep.doctor.environment.rules.findings import find
from ortprep.runtime.loading.session import CPU, CUDA
from tests.doctor.environment.builders import (
    HEALTHY,
    RECORDINGS,
    WITHOUT_GPU,
    codes,
    facts_of,
    one,
    read_recording,
)

GPU_RECORDINGS = tuple(name for name in RECORDINGS if name.startswith("onnxruntime-gpu"))
CPU_RECORDINGS = tuple(name for name in RECORDINGS if name not in GPU_RECORDINGS)


def test_there_are_recordings_of_both_wheels_and_of_the_oldest_version() -> None:
    assert {"onnxruntime-1.23.2", "onnxruntime-gpu-1.23.2"} <= set(RECORDINGS)
    assert len(GPU_RECORDINGS) >= 3


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_cpu_provider_is_found_usable(name: str) -> None:
    providers = {p.name: p for p in facts_of(read_recording(name), WITHOUT_GPU).providers}
    assert providers[CPU].usable


@pytest.mark.parametrize("name", GPU_RECORDINGS)
def test_cuda_is_unusable_for_the_library_that_was_missing_first(name: str) -> None:
    facts = facts_of(read_recording(name), HEALTHY)
    provider = next(provider for provider in facts.providers if provider.name == CUDA)
    major = facts.runtime.cuda_version.partition(".")[0]
    assert provider.reason.startswith(f"libcublasLt.so.{major}: cannot open shared object file")
    assert "\x1b" not in provider.reason


@pytest.mark.parametrize("name", GPU_RECORDINGS)
def test_every_missing_library_is_named_with_its_package(name: str) -> None:
    facts = facts_of(read_recording(name), HEALTHY)
    missing = {library.name for library in facts.libraries if library.error}
    text = " ".join(finding.text for finding in find(facts) if finding.code == "missing-library")
    assert len(missing) > 5
    assert all(library in text for library in missing - {"libcuda.so.1"})
    assert all(library.package for library in facts.libraries if library.name != "libcuda.so.1")


@pytest.mark.parametrize(
    ("name", "library", "package"),
    [
        ("onnxruntime-gpu-1.23.2", "libcublas.so.12", "nvidia-cublas-cu12==12.*"),
        ("onnxruntime-gpu-1.23.2", "libcudart.so.12", "nvidia-cuda-runtime-cu12==12.*"),
        ("onnxruntime-gpu-1.23.2", "libcudnn.so.9", "nvidia-cudnn-cu12==9.*"),
        # What 1.27 itself asks for, nvidia-cuda-runtime-cu13~=13.0, is not to be had.
        ("onnxruntime-gpu-1.27.0", "libcudart.so.13", "nvidia-cuda-runtime==13.*"),
        ("onnxruntime-gpu-1.27.0", "libcudnn.so.9", "nvidia-cudnn-cu13==9.*"),
        ("onnxruntime-gpu-1.31.1", "libcublasLt.so.13", "nvidia-cublas==13.*"),
        ("onnxruntime-gpu-1.31.1", "libcufft.so.12", "nvidia-cufft==12.*"),
        ("onnxruntime-gpu-1.31.1", "libnvinfer.so.10", "tensorrt-cu13==10.*"),
    ],
)
def test_packages_are_those_of_the_cuda_the_wheel_was_built_with(
    name: str, library: str, package: str
) -> None:
    libraries = {entry.name: entry for entry in facts_of(read_recording(name), HEALTHY).libraries}
    assert libraries[library].package == package


@pytest.mark.parametrize("name", CPU_RECORDINGS)
def test_a_cpu_wheel_asked_for_cuda_is_a_problem_with_the_wheel_to_install(name: str) -> None:
    findings = find(facts_of(read_recording(name), WITHOUT_GPU), expected=(CUDA,))
    found = one(findings, "provider-not-in-wheel")
    assert found.severity == "problem"
    assert found.hint is not None
    assert "onnxruntime-gpu[cuda,cudnn]" in found.hint


@pytest.mark.parametrize("name", CPU_RECORDINGS)
def test_a_cpu_wheel_that_nobody_asked_for_cuda_is_in_order(name: str) -> None:
    findings = find(facts_of(read_recording(name), WITHOUT_GPU))
    assert {finding.severity for finding in findings} == {"ok"}


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_recording_makes_tables_whose_rows_fit_their_columns(name: str) -> None:
    diagnosis = describe(facts_of(read_recording(name), HEALTHY), expect=["cuda"])
    assert len(diagnosis.tables) >= 3
    for table in diagnosis.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize("name", GPU_RECORDINGS)
def test_the_wheel_alone_on_a_gpu_machine_is_unusable(name: str) -> None:
    findings = find(facts_of(read_recording(name), HEALTHY))
    assert {"provider-unusable", "missing-library"} <= codes(findings)
    assert one([f for f in findings if f.text.startswith("CUDA:")], "provider-unusable").severity == "problem"
