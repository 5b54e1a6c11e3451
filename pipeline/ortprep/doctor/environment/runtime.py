"""ONNX Runtime and its execution providers: the rows that show them, and what is found of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.environment.facts import Facts, Row
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_SINCE, TELEMETRY_VARIABLE, is_telemetry_off
from ortprep.versions import parse_version

OLDEST = (1, 23)
"""First version of ONNX Runtime that bundles are loaded with."""

GPU_WHEEL, _CPU_WHEEL = "onnxruntime-gpu", "onnxruntime"


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
        yield "driver", f"{facts.driver or device.driver_version}, serves CUDA up to {device.cuda_version}"
    elif facts.driver:
        yield "driver", facts.driver
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
        best = GPU_WHEEL if facts.has_gpu else _CPU_WHEEL
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
    if runtime.version and (version or ()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        text = f"ONNX Runtime {runtime.version} is older than {oldest}, the oldest supported"
        yield Finding("onnxruntime-too-old", "problem", text, f"pip install --upgrade {wheel}")


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


def library_rows(facts: Facts) -> Iterator[Row]:
    """Yields the libraries of CUDA, and where they come from."""
    for name, file in sorted(facts.runtime.libraries.items()):
        yield name, file or "missing"


def find_in_providers(facts: Facts) -> Iterator[Finding]:
    """Yields which execution providers work.

    A wheel has code for more than a machine can use: that is a problem only where it was to be used.
    """
    runtime = facts.runtime
    needed = (*facts.expected, CPU, *([CUDA] if facts.has_gpu else []))
    missing = [name for name, file in runtime.libraries.items() if not file]
    for name, reason in facts.providers.items():
        if reason is None:
            yield Finding("provider-usable", "ok", f"{_short(name)}: a session was made and run")
            continue
        text = f"{_short(name)}: the wheel lists it, but no session can be made on it: {reason}"
        if name not in needed:
            beside = "there is no GPU here, and " if name == CUDA else ""
            yield Finding("provider-unusable", "note", f"{text} ({beside}it was not asked for)")
        elif name == CUDA:
            hint = install_cuda(facts) if missing else "nvidia-smi  (does it list the GPU?)"
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
    # Libraries of CUDA are nothing to install on a machine that has no GPU to use them.
    if missing and CUDA in needed:
        text = f"not found, needed by CUDA: {', '.join(sorted(missing))}"
        yield Finding("missing-library", "problem", text, install_cuda(facts))


def install_cuda(facts: Facts) -> str:
    """Returns the command that installs the wheel with CUDA and the libraries that it was built with."""
    if set(facts.wheels) == {GPU_WHEEL}:
        return f"pip install '{GPU_WHEEL}[cuda,cudnn]=={facts.wheels[GPU_WHEEL]}'"
    names = sorted({_CPU_WHEEL, *facts.wheels})
    return f"pip uninstall -y {quoted(*names)} && pip install '{GPU_WHEEL}[cuda,cudnn]'"


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")
