from __future__ import annotations

import pytest

from ortprep.doctor.environment.facts.packages import is_known, requirement_for


@pytest.mark.parametrize(
    ("library", "cuda", "expected"),
    [
        ("libcudart.so.12", "12.2", "nvidia-cuda-runtime-cu12==12.*"),
        ("libcudart.so.13", "13.0", "nvidia-cuda-runtime==13.*"),
        ("libcudnn.so.9", "13.0", "nvidia-cudnn-cu13==9.*"),
        ("libnvrtc.so.11.2", "11.8", "nvidia-cuda-nvrtc-cu11==11.*"),
        ("libcublas.so", "13.0", "nvidia-cublas"),
        ("libcuda.so.1", "13.0", None),
        ("libopenvino.so.2025", "", None),
    ],
)
def test_packages_carry_the_number_of_cuda_as_nvidia_names_them(
    library: str, cuda: str, expected: str | None
) -> None:
    assert requirement_for(library, cuda) == expected


def test_libraries_of_the_system_are_of_no_interest() -> None:
    assert not any(map(is_known, ("libc.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2")))
    assert is_known("libcuda.so.1")
