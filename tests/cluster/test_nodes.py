"""Labels say what a machine is, in Ray's alphabet."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ortprep.cluster.nodes import describe_hardware
from ortprep.runtime.machine.hardware import Gpu, Hardware, read_hardware

VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def hardware(cpu: str, gpu: str | None) -> Hardware:
    gpus = () if gpu is None else (Gpu(gpu, (9, 0), 1, "580", "13.0", "GPU-1"),)
    return Hardware("x86_64", cpu, ("avx2", "avx512f", "fma"), 4, 2**30, gpus)


@given(st.text(max_size=100), st.none() | st.text(max_size=100))
def test_every_value_is_one_that_ray_takes(cpu, gpu):
    for key, value in describe_hardware(hardware(cpu, gpu)).items():
        assert VALUE.fullmatch(value)
        assert key.startswith("ortprep.io/")


def test_instruction_sets_and_the_gpu_are_told():
    labels = describe_hardware(hardware("Intel(R) Xeon(R) CPU @ 2.50GHz", "NVIDIA H200"))
    assert labels == {
        "ortprep.io/machine": "x86_64",
        "ortprep.io/cpu": "Intel-R-Xeon-R-CPU-2.50GHz",
        "ortprep.io/avx2": "true",
        "ortprep.io/avx512f": "true",
        "ortprep.io/gpu": "NVIDIA-H200",
        "ortprep.io/compute-capability": "9.0",
    }


def test_this_machine_has_some():
    assert describe_hardware(read_hardware())["ortprep.io/machine"]
