"""Rules about the GPUs: driver, code for them, and how they are connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.environment.facts.records import Facts
from ortprep.runtime.loading.session import CUDA
from ortprep.versions import parse_version

_HIDING, _LOADING = "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING"


def check_access(facts: Facts, expected: Sequence[str]) -> Iterator[Finding]:
    """Yields why there are no GPUs to use, or fewer than there could be."""
    hidden = _HIDING in facts.variables
    if hidden and len(facts.gpus) < facts.bus_gpus:
        yield Finding(
            "gpus-hidden",
            "problem" if not facts.gpus and CUDA in expected else "note",
            f"{len(facts.gpus)} of {facts.bus_gpus} GPUs can be used: {_HIDING}={facts.variables[_HIDING]!r}",
            f"unset {_HIDING}",
        )
    elif facts.bus_gpus and not facts.gpus:
        yield _without_driver(facts)
    elif CUDA in expected and not facts.gpus:
        yield Finding(
            "no-gpu",
            "problem",
            "CUDA was asked for, but neither the PCI bus nor the CUDA driver shows a GPU",
            "nvidia-smi  (in a container: docker run --gpus all …)",
        )
    if facts.gpus and facts.runtime.version and CUDA not in facts.runtime.available:
        yield _unused(facts, expected)
    if facts.gpus and facts.variables.get(_LOADING, "").upper() == "EAGER":
        yield Finding(
            "eager-module-loading",
            "advice",
            f"{_LOADING}=EAGER loads every kernel of every library at start, used or not",
            f"unset {_LOADING}  (CUDA has loaded lazily by itself since 12.2)",
        )


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Yields whether the driver serves the CUDA that ONNX Runtime was built with."""
    built = parse_version(facts.runtime.cuda_version)
    if built is None or not facts.gpus:
        return
    device = facts.gpus[0].device
    served = parse_version(device.cuda_version)
    if served is None or served[0] >= built[0]:
        return
    yield Finding(
        "driver-too-old",
        "problem",
        f"driver {device.driver_version} serves CUDA up to {device.cuda_version}, "
        f"and ONNX Runtime {facts.runtime.version} was built with {facts.runtime.cuda_version}",
        f"update the NVIDIA driver, or install an ONNX Runtime built with CUDA {served[0]}",
    )


def check_state(facts: Facts) -> Iterator[Finding]:
    """Yields what each GPU's driver costs."""
    for ordinal, state in enumerate(facts.gpus):
        if state.persistence is False:
            yield Finding(
                "gpu-persistence-off",
                "advice",
                f"GPU {ordinal} ({state.device.name}): persistence mode is off, so a process that finds "
                "no other on it waits 1 to 3 s for the driver to initialise it "
                "(https://docs.nvidia.com/deploy/driver-persistence/overview.html)",
                "sudo nvidia-smi -pm 1  (or run nvidia-persistenced)",
            )


def _without_driver(facts: Facts) -> Finding:
    loaded = (
        f"the driver {facts.driver} is loaded, but CUDA gives no access to it"
        if facts.driver
        else "no NVIDIA driver is loaded"
    )
    return Finding(
        "gpu-without-driver",
        "problem",
        f"{facts.bus_gpus} NVIDIA GPU(s) on the PCI bus, but none of them can be used: {loaded}",
        "nvidia-smi  (in a container: docker run --gpus all …, which brings libcuda.so.1)",
    )


def _unused(facts: Facts, expected: Sequence[str]) -> Finding:
    names = ", ".join(dict.fromkeys(state.device.name for state in facts.gpus))
    package = facts.runtime.package or "the wheel"
    return Finding(
        "gpu-unused",
        "problem" if CUDA in expected else "advice",
        f"{len(facts.gpus)} GPU(s) here ({names}), "
        f"and {package} {facts.runtime.version} has no code for CUDA",
        "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'",
    )
