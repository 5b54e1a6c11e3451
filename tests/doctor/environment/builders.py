"""A machine that nothing is wrong with, and recordings of real ones."""

import json
from dataclasses import replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.doctor.environment_facts import DiskSpace, Facts, InstalledRuntime, ResourceLimits, parse_reason
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.runtime.machine.hardware import Gpu, Hardware

GB = 10**9
SITE = "/opt/venv/lib/python3.11/site-packages"
RECORDED = Path(__file__).parent / "recorded"
RECORDINGS = tuple(sorted(file.stem for file in RECORDED.glob("*.json")))

HOPPER = Gpu("NVIDIA H100", (9, 0), 80 * GB, "580.65.06", "13.0", "GPU-0")
HEALTHY = Facts(
    wheels={"onnxruntime-gpu": "1.31.1"},
    runtime=InstalledRuntime(*("1.31.1", "onnxruntime-gpu", "13.0", "", f"{SITE}/onnxruntime", (CUDA, CPU))),
    providers={CUDA: None, CPU: None},
    gpus=(HOPPER,),
    hardware=Hardware("x86_64", "a processor", ("avx", "avx2", "avx512f", "fma"), 8, 64 * GB),
    limits=ResourceLimits(),
    shared_memory=DiskSpace("/dev/shm", 32 * GB, 32 * GB),
    artifacts=DiskSpace("/srv/artifacts", 500 * GB, 400 * GB),
)
"""A machine with a GPU, where everything is as it should be."""

WITHOUT_GPU = replace(HEALTHY, gpus=(), providers={CUDA: "no libcublas.so.13", CPU: None})
"""The same wheel on a machine without a GPU."""


def read_recording(name, machine):
    """Returns a machine with the ONNX Runtime that was recorded on another."""
    recording = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    runtime = decode(InstalledRuntime, recording["runtime"])
    attempts = recording["attempts"].items()
    return replace(
        machine,
        wheels={runtime.package: runtime.version},
        runtime=runtime,
        providers={name: one["failure"] and parse_reason(**one) for name, one in attempts},
    )


def codes(findings):
    return {finding.code for finding in findings}


def one(findings, code):
    (found,) = (finding for finding in findings if finding.code == code)
    return found
