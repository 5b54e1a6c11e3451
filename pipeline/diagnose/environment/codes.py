"""Every finding there can be, by its code."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, str] = {
    "no-onnxruntime": "no ONNX Runtime is installed",
    "onnxruntime-broken": "ONNX Runtime is installed and cannot be imported",
    "both-wheels-installed": "several distributions own the same files of the package `onnxruntime`",
    "onnxruntime-shadowed": "an installed ONNX Runtime hides another that is installed elsewhere",
    "onnxruntime-version-differs": "what is imported is not the version of the installed wheel",
    "onnxruntime-too-old": "older than the oldest version that bundles are loaded with",
    "usage-data-off": "ONNX Runtime sends no usage data to its maker from what ortprep starts",
    "usage-data-sent": "ONNX Runtime sends usage data, because of `ORT_DISABLE_TELEMETRY`",
    "provider-usable": "a session on this provider was made and run",
    "provider-unusable": "the wheel has this provider, and no session on it can be made",
    "provider-not-in-wheel": "a provider was asked for that the wheel has no code for",
    "missing-library": "libraries that a provider needs are not found",
    "no-gpu": "CUDA was asked for, and there is no GPU",
    "gpu-unused": "there is a GPU, and the wheel has no code for CUDA",
    "gpu-without-driver": "a GPU is on the bus that CUDA does not give access to",
    "gpus-hidden": "fewer GPUs can be used than there are, because of `CUDA_VISIBLE_DEVICES`",
    "driver-too-old": "the driver serves an older CUDA than ONNX Runtime was built with",
    "native-code": "the wheel has machine code for this GPU",
    "compiles-at-start": "the wheel has PTX alone for this GPU, which the driver compiles at the first load",
    "no-code-for-gpu": "the wheel has neither machine code nor PTX for this GPU",
    "eager-module-loading": "every kernel is loaded at start, because of `CUDA_MODULE_LOADING`",
    "gpu-persistence-off": "the driver initialises the GPU anew for each first process",
    "pcie-link-degraded": "the PCIe link runs below what GPU and slot can do",
    "no-avx2": "the processor lacks AVX2, or this process does not see it",
    "no-avx512": "the processor lacks AVX-512",
    "cores-above-quota": "ONNX Runtime starts more threads than the control group lets run",
    "cpu-throttled": "the control group was stopped for having used up its processor time",
    "memory-limited": "the control group grants little memory",
    "no-shared-memory": "there is no `/dev/shm`",
    "small-shared-memory": "`/dev/shm` has too little room for a pool's tensors",
    "slow-disk": "bundles are read slowly from the disk",
    "disk-not-measured": "how fast bundles are read from the disk could not be told",
    "low-space": "there is little room for bundles",
}
"""What each finding is, in a few words; `text` and `hint` of a finding say the rest."""
