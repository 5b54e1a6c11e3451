"""A machine that nothing is wrong with, and recordings of real ones."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode
from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.environment.facts.ort_probe import ProviderAttempt
from ortprep.doctor.environment.facts.records import (
    DiskSpace,
    Facts,
    GpuState,
    InstalledRuntime,
    Library,
    PcieLink,
    Provider,
    Wheel,
)
from ortprep.doctor.environment.facts.runtime import add_packages, judge_attempt
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.runtime.machine.cgroups import ResourceLimits
from ortprep.runtime.machine.hardware import Gpu, Hardware
from tests.conftest import ROOT

GB = 10**9
SITE = "/opt/venv/lib/python3.11/site-packages"
RECORDED = Path(__file__).parent / "recorded"
RECORDINGS = tuple(sorted(file.stem for file in RECORDED.glob("*.json")))

HOPPER = Gpu("NVIDIA H100", (9, 0), 80 * GB, "580.65.06", "13.0", "GPU-0")
HEALTHY = Facts(
    wheels=(Wheel("onnxruntime-gpu", "1.31.1"),),
    runtime=InstalledRuntime("1.31.1", "onnxruntime-gpu", "13.0", "", f"{SITE}/onnxruntime", (CUDA, CPU)),
    providers=(Provider(CUDA, usable=True), Provider(CPU, usable=True)),
    libraries=(Library("libcublas.so.13", (CUDA,), file="/usr/lib/libcublas.so.13", version="13.0.2"),),
    gpus=(GpuState(HOPPER, free_bytes=79 * GB, persistence=True, link=PcieLink(5, 16, 5, 16)),),
    bus_gpus=1,
    driver="580.65.06",
    hardware=Hardware("x86_64", "a processor", ("avx", "avx2", "avx512f", "fma"), 8, 64 * GB),
    limits=ResourceLimits(),
    shared_memory=DiskSpace("/dev/shm", 32 * GB, 32 * GB),
    artifacts=DiskSpace("/srv/artifacts", 500 * GB, 400 * GB),
)
"""A machine with a GPU, where everything is as it should be."""

WITHOUT_GPU = replace(
    HEALTHY,
    gpus=(),
    bus_gpus=0,
    driver="",
    providers=(Provider(CUDA, usable=False, reason="no libcublas.so.13"), Provider(CPU, usable=True)),
)
"""The same wheel on a machine without a GPU."""


def read_recording(name: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return recording


def facts_of(recording: dict[str, Any], machine: Facts) -> Facts:
    """Returns a machine with the ONNX Runtime that was recorded on another."""
    runtime = decode(InstalledRuntime, recording["runtime"])
    libraries = decode(tuple[Library, ...], recording["libraries"])
    return replace(
        machine,
        wheels=(Wheel(runtime.package, runtime.version),),
        runtime=runtime,
        providers=tuple(
            judge_attempt(name, decode(ProviderAttempt, reply))
            for name, reply in recording["attempts"].items()
        ),
        libraries=add_packages(libraries, runtime.cuda_version),
    )


def documented_codes() -> list[str]:
    """Returns the codes that the page on the doctor lists."""
    page = (ROOT.parent / "docs/doctor.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([a-z0-9-]+)` \|", page.partition("## Findings of `env`")[2], re.MULTILINE)


def codes(findings: Sequence[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def one(findings: Sequence[Finding], code: str) -> Finding:
    (found,) = (finding for finding in findings if finding.code == code)
    return found


def build_elf(sections: dict[str, bytes]) -> bytes:
    """A shared library with these sections and nothing else."""
    contents = {"": b"", **sections}
    names = b"\0".join(name.encode() for name in (*contents, ".shstrtab")) + b"\0"
    contents[".shstrtab"] = names
    body, table = b"", b""
    for name, content in contents.items():
        at = names.index(name.encode() + b"\0")
        table += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(content), 0, 0, 8, 0)
        body += content
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        *(3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(contents), len(contents) - 1),
    )
    return head + body + table


def build_linked_elf(*libraries: str) -> bytes:
    """A shared library that links to others and has nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in libraries)
    needed = (struct.pack("<qQ", 1, names.index(name.encode())) for name in libraries)
    return build_elf({".dynstr": names, ".dynamic": b"".join((*needed, struct.pack("<qQ", 0, 0)))})
