"""`doctor env`: is this machine set up well for ONNX Runtime?

Rows show what was read of it, topic by topic; findings are what is wrong or could be better. All but
`diagnose_environment` is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.doctor.diagnosis import Diagnosis, Finding, Severity, diagnose, format_bytes
from ortprep.doctor.environment_facts import DiskSpace, Facts, Row, read_facts
from ortprep.measuring.device_lock import working
from ortprep.options import OLDEST, version_parts
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.runtime.machine.hardware import KERNEL_FEATURES
from ortprep.tables import Table
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_SINCE, TELEMETRY_VARIABLE, is_telemetry_off
from ortprep.versions import parse_version

GPU_WHEEL, _CPU_WHEEL = "onnxruntime-gpu", "onnxruntime"

MIN_SHARED_BYTES = 64 * 1024 * 1024
"""Default size in container engines; a pool's tensors do not fit."""

MIN_SPACE_BYTES = 1024**3
LOW_SPACE_BYTES = 5 * MIN_SPACE_BYTES
_THROTTLED_SHARE = 0.01

_HIDING = "CUDA_VISIBLE_DEVICES"
_LOOK_FOR_GPUS = "nvidia-smi  (in a container: docker run --gpus all …, which brings libcuda.so.1)"
_LOOK_FOR_AVX2 = (
    "lscpu | grep -o 'avx[^ ]*'  (a virtual machine may hide it: give it the host's processor model)"
)


def diagnose_environment(*, artifacts: Path, expect: Sequence[str] = ()) -> Diagnosis:
    """Returns what ONNX Runtime finds on this machine, and what it misses; takes a few seconds.

    It makes sessions, so it waits for measurements. It does not wait for builds, which may take hours where
    this is a container's start-up check.

    Args:
        artifacts: Folder of the bundles, there or not.
        expect: What must work: `cuda`, `cpu`, or the full name of another execution provider.

    Raises:
        CacheError: The folder of the device's lock cannot be trusted.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    expected = [{"cpu": CPU, "cuda": CUDA}.get(name.lower(), name) for name in dict.fromkeys(expect)]
    with working():
        facts = read_facts(artifacts=artifacts, expected=expected)
    return describe(facts)


def describe(facts: Facts) -> Diagnosis:
    """Returns the diagnosis of facts that were read here or elsewhere. Pure."""
    tried = "Execution providers, each tried in a process of its own"
    gpu_columns = ("GPU", "memory, GB", "capability")
    tables = (
        Table("ONNX Runtime", ("what", "is"), tuple(runtime_rows(facts))),
        Table(tried, ("provider", "usable", "why not"), tuple(provider_rows(facts))),
        Table("GPUs", gpu_columns, tuple(gpu_rows(facts))),
        Table("Machine", ("what", "is"), tuple(machine_rows(facts))),
    )
    findings = [finding for topic in _TOPICS for finding in topic(facts)]
    return diagnose("env", findings, tables=tables, figures=encode(facts))


# -- ONNX Runtime and its execution providers


def runtime_rows(facts: Facts) -> Iterator[Row]:
    """Yields what is installed and imported."""
    for name, version in facts.wheels.items():
        yield "wheel", f"{name} {version}"
    runtime = facts.runtime
    if runtime.error is not None:
        yield "import", runtime.error
        return
    yield "version", f"{runtime.version} from {runtime.folder}"
    yield "build", runtime.build_info.removeprefix("ORT Build Info: ")
    if runtime.cuda_version:
        yield "built with CUDA", runtime.cuda_version
    if facts.gpus:
        device = facts.gpus[0]
        yield "driver", f"{device.driver_version}, serves CUDA up to {device.cuda_version}"
    yield from facts.variables.items()


def find_in_installation(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong with the wheels and what they import."""
    wheels, runtime = facts.wheels, facts.runtime
    # The one wheel to have: that which is there, or the one with CUDA where there are several.
    wheel = GPU_WHEEL if GPU_WHEEL in wheels else max(wheels, default=_CPU_WHEEL)
    reinstall = f"pip uninstall -y {' '.join(sorted(wheels))} && pip install {wheel}"
    if len(wheels) > 1:
        named = ", ".join(f"{name} {version}" for name, version in wheels.items())
        text = (
            f"{named} are installed at once and own the same files: whichever was installed last is "
            "imported, and removing either breaks the other"
        )
        yield Finding("both-wheels-installed", "problem", text, reinstall)
    if runtime.error is not None and not wheels:
        text = f"no ONNX Runtime is installed: {runtime.error}"
        best = GPU_WHEEL if facts.gpus else _CPU_WHEEL
        yield Finding("no-onnxruntime", "problem", text, f"pip install {best}")
    elif runtime.error is not None:
        text = f"ONNX Runtime cannot be imported: {runtime.error}"
        yield Finding("onnxruntime-broken", "problem", text, reinstall)
    version = parse_version(runtime.version)
    if runtime.version and wheels and version not in map(parse_version, wheels.values()):
        name, wheel_version = next(iter(wheels.items()))
        imported = f"{runtime.version} is imported from {runtime.folder}"
        text = f"{name} {wheel_version} is installed, but {imported}"
        yield Finding("onnxruntime-version-differs", "problem", text, reinstall)
    if runtime.version and (version or ()) < version_parts(OLDEST):
        text = f"ONNX Runtime {runtime.version} is older than {OLDEST}, the oldest supported"
        yield Finding("onnxruntime-too-old", "problem", text, f"pip install --upgrade {wheel}")
    if (problem := runtime.bytecode.problem) is not None:
        yield Finding("no-bytecode", "advice", problem, runtime.bytecode.remedy)


def find_usage_data(facts: Facts) -> Iterator[Finding]:
    """Yields whether processes of ortprep send usage data, for versions of ONNX Runtime that can."""
    if (parse_version(facts.runtime.version) or ()) < TELEMETRY_SINCE:
        return
    value = facts.variables.get(TELEMETRY_VARIABLE, TELEMETRY_OFF)
    if is_telemetry_off(value):
        text = f"ONNX Runtime sends no usage data: {TELEMETRY_VARIABLE}={value} in every process of ortprep"
        yield Finding("usage-data-off", "ok", text)
    else:
        text = (
            f"ONNX Runtime {facts.runtime.version} sends usage data to its maker, with names of model files "
            f"and hashes of weights, since {TELEMETRY_VARIABLE} is {value!r}"
        )
        hint = f"export {TELEMETRY_VARIABLE}={TELEMETRY_OFF}   (or unset it: ortprep sets it then)"
        yield Finding("usage-data-sent", "advice", text, hint)


def provider_rows(facts: Facts) -> Iterator[Row]:
    """Yields every execution provider, and why it cannot be used."""
    for name, reason in facts.providers.items():
        yield _short(name), "yes" if reason is None else "no", reason


def find_in_providers(facts: Facts) -> Iterator[Finding]:
    """Yields which execution providers work.

    A wheel has code for more than a machine can use: that is a problem only where it was to be used.
    """
    runtime = facts.runtime
    needed = (*facts.expected, CPU, *([CUDA] if facts.gpus else []))
    for name, reason in facts.providers.items():
        if reason is None:
            yield Finding("provider-usable", "ok", f"{_short(name)}: a session was made and run")
            continue
        text = f"{_short(name)}: the wheel lists it, but no session can be made on it: {reason}"
        if name not in needed:
            beside = "there is no GPU here, and " if name == CUDA else ""
            yield Finding("provider-unusable", "note", f"{text} ({beside}it was not asked for)")
        elif name == CUDA:
            is_missing = "shared object" in reason  # a library of CUDA
            hint = install_cuda(facts) if is_missing else "nvidia-smi  (does it list the GPU?)"
            yield Finding("provider-unusable", "problem", text, hint)
        else:
            hint = (
                "python -c 'import onnxruntime; onnxruntime.print_debug_info()'"
                f"  (what {quoted(name)} is built with)"
            )
            yield Finding("provider-unusable", "problem", text, hint)
    package = f"{runtime.package or max(facts.wheels, default=_CPU_WHEEL)} {runtime.version}"
    for name in facts.expected:
        if runtime.error is None and name not in runtime.available:
            text = (
                f"{_short(name)} was asked for, and {package} has "
                f"{', '.join(map(_short, runtime.available))} only: its sessions would run on the CPU"
            )
            way_out = install_cuda(facts) if name == CUDA else None
            yield Finding("provider-not-in-wheel", "problem", text, way_out)


def install_cuda(facts: Facts) -> str:
    """Returns the command that installs the wheel with CUDA and the libraries that it was built with."""
    if set(facts.wheels) == {GPU_WHEEL}:
        return f"pip install '{GPU_WHEEL}[cuda,cudnn]=={facts.wheels[GPU_WHEEL]}'"
    names = sorted({_CPU_WHEEL, *facts.wheels})
    return f"pip uninstall -y {quoted(*names)} && pip install '{GPU_WHEEL}[cuda,cudnn]'"


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


# -- GPUs, processor, limits and disk


def gpu_rows(facts: Facts) -> Iterator[Row]:
    """Yields every GPU."""
    for ordinal, gpu in enumerate(facts.gpus):
        capability = ".".join(map(str, gpu.compute_capability))
        yield f"{ordinal} {gpu.name}", round(gpu.memory_bytes / 1e9, 1), capability


def find_in_gpus(facts: Facts) -> Iterator[Finding]:
    """Yields that there is no GPU though CUDA was requested, or that ONNX Runtime has no code for one."""
    runtime, is_expected = facts.runtime, CUDA in facts.expected
    if is_expected and not facts.gpus:
        hidden = f" with {_HIDING}={facts.variables[_HIDING]!r}" if _HIDING in facts.variables else ""
        text = f"CUDA was asked for, but its driver is missing or shows no GPU{hidden}"
        yield Finding("no-gpu", "problem", text, _LOOK_FOR_GPUS)
    if facts.gpus and runtime.version and CUDA not in runtime.available:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))
        wheel = f"{runtime.package or 'the wheel'} {runtime.version}"
        text = f"{len(facts.gpus)} GPU(s) here ({names}), and {wheel} has no code for CUDA"
        yield Finding("gpu-unused", "problem" if is_expected else "advice", text, install_cuda(facts))


def machine_rows(facts: Facts) -> Iterator[Row]:
    """Yields processor, limits, memory and disk."""
    hardware, limits = facts.hardware, facts.limits
    yield "processor", hardware.cpu_model or hardware.machine
    yield "instruction sets", " ".join(flag for flag in hardware.cpu_features if flag in KERNEL_FEATURES)
    granted = "no limit" if limits.quota_cores is None else f"the time of {limits.quota_cores:.3g} granted"
    yield "cores", f"{hardware.cores} ({granted})"
    if limits.quota_cores is not None:
        yield "throttled periods", f"{limits.throttled_periods} of {limits.periods}"
    bounded = "no limit" if limits.memory_bytes is None else f"{format_bytes(limits.memory_bytes)} granted"
    yield "memory", f"{format_bytes(hardware.memory_bytes)} ({bounded})"
    yield "/dev/shm", _describe_space(facts.shared_memory)
    yield "bundles", _describe_space(facts.artifacts)


def _describe_space(space: DiskSpace) -> str:
    return f"{format_bytes(space.free_bytes)} of {format_bytes(space.total_bytes)} free: {space.path}"


def find_in_processor(facts: Facts) -> Iterator[Finding]:
    """Yields what makes the processor slow: missing instructions, or a quota below its cores."""
    hardware, limits = facts.hardware, facts.limits
    if hardware.machine in ("x86_64", "AMD64") and "avx2" not in hardware.cpu_features:
        name = hardware.cpu_model or "the processor"
        text = f"{name} shows no AVX2: ONNX Runtime's CPU kernels fall back to code several times slower"
        yield Finding("no-avx2", "advice", text, _LOOK_FOR_AVX2)
    quota, cores = limits.quota_cores, hardware.cores
    if quota is not None and cores > math.ceil(quota):
        text = (
            f"ONNX Runtime sees {cores} processors and chooses its threads by them; the control group "
            f"grants the time of {quota:.3g}, and all threads stop when that is used up"
        )
        hint = (
            f"runtime: {{intra_op_num_threads: {max(1, math.floor(quota)):d}}} in the spec; "
            "ortprep doctor parallel MODEL measures what it costs"
        )
        yield Finding("cores-above-quota", "advice", text, hint)
    if stopped := limits.throttled_periods:
        share = stopped / max(limits.periods, stopped)
        text = (
            f"the control group was stopped in {stopped} of {limits.periods} scheduling periods "
            f"({share:.0%}), because its processor time was used up"
        )
        hint = "a higher limit (docker run --cpus=…, resources.limits.cpu), or fewer intra_op_num_threads"
        yield Finding("cpu-throttled", "advice" if share >= _THROTTLED_SHARE else "note", text, hint)


def find_in_memory(facts: Facts) -> Iterator[Finding]:
    """Yields where shared memory or disk space is little."""
    room = facts.shared_memory
    if room.total_bytes <= MIN_SHARED_BYTES:
        text = (
            f"{room.path} is {format_bytes(room.total_bytes)}, as container engines make it: "
            "Ray keeps objects there (SessionPool does not need it)"
        )
        hint = "docker run --shm-size=8g …  (Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
        yield Finding("small-shared-memory", "advice", text, hint)
    room = facts.artifacts
    if room.free_bytes < LOW_SPACE_BYTES:
        text = (
            f"{format_bytes(room.free_bytes)} free where bundles are kept ({room.path}); a build needs "
            "several times the size of a model"
        )
        severity: Severity = "problem" if room.free_bytes < MIN_SPACE_BYTES else "advice"
        yield Finding("low-space", severity, text, quoted("df", "-h", room.path))


_TOPICS = (
    find_in_installation,
    find_usage_data,
    find_in_providers,
    find_in_gpus,
    find_in_processor,
    find_in_memory,
)
