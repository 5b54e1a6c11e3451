"""Rules about ONNX Runtime: its wheels, its providers, the libraries they compute with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortprep.doctor.diagnosis import Finding, Severity
from ortprep.doctor.environment.facts.packages import DRIVER_LIBRARIES
from ortprep.doctor.environment.facts.records import Facts, Library, Provider, Wheel, short_name
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_SINCE, TELEMETRY_VARIABLE, is_telemetry_off
from ortprep.versions import parse_version

OLDEST = (1, 23)
"""First version of ONNX Runtime that bundles are loaded with."""

_GPU_WHEEL, _CPU_WHEEL = "onnxruntime-gpu", "onnxruntime"


def check_wheels(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong with what is installed."""
    if len({wheel.name for wheel in facts.wheels}) > 1:
        yield _several_wheels(facts.wheels)
    if facts.runtime.error is not None:
        yield _broken_import(facts)
        return
    version = facts.runtime.version
    if facts.wheels and parse_version(version) not in {
        parse_version(wheel.version) for wheel in facts.wheels
    }:
        wheel = facts.wheels[0]
        yield Finding(
            "onnxruntime-version-differs",
            "problem",
            f"{wheel} is installed, but {version} is imported from {facts.runtime.folder}",
            _reinstall(facts, wheel.name),
        )
    if (parse_version(version) or ()) < OLDEST:
        yield Finding(
            "onnxruntime-too-old",
            "problem",
            f"ONNX Runtime {version} is older than {'.'.join(map(str, OLDEST))}, the oldest supported",
            f"pip install --upgrade {_wheel_for(facts)}",
        )


def check_telemetry(facts: Facts) -> Iterator[Finding]:
    """Yields whether ONNX Runtime sends usage data to its maker."""
    if (parse_version(facts.runtime.version) or ()) < TELEMETRY_SINCE:
        return
    value = facts.variables.get(TELEMETRY_VARIABLE, TELEMETRY_OFF)
    if is_telemetry_off(value):
        text = f"ONNX Runtime sends no usage data: {TELEMETRY_VARIABLE}={value} in every process of ortprep"
        yield Finding("usage-data-off", "ok", text)
        return
    text = (
        f"ONNX Runtime {facts.runtime.version} sends usage data to its maker, with names of model files and "
        f"hashes of weights, since {TELEMETRY_VARIABLE} is {value!r}"
    )
    hint = f"export {TELEMETRY_VARIABLE}={TELEMETRY_OFF}   (or unset it: ortprep sets it then)"
    yield Finding("usage-data-sent", "advice", text, hint)


def check_providers(facts: Facts, expected: Sequence[str]) -> Iterator[Finding]:
    """Yields which providers work and which do not."""
    for provider in facts.providers:
        name = short_name(provider.name)
        if provider.usable:
            yield Finding("provider-usable", "ok", f"{name}: a session was made and run")
        else:
            yield _unusable(facts, provider, expected)
    if facts.runtime.error is None:
        for missing in expected:
            if missing not in facts.runtime.available:
                yield _not_in_wheel(facts, missing)


def check_libraries(facts: Facts, expected: Sequence[str]) -> Iterator[Finding]:
    """Yields the libraries that are missed here, one finding for each package that brings some."""
    missing: dict[str, list[Library]] = {}
    for library in facts.libraries:
        if library.error is not None and library.name not in DRIVER_LIBRARIES:
            missing.setdefault(library.package or library.name, []).append(library)
    for package, libraries in missing.items():
        users = dict.fromkeys(name for library in libraries for name in library.needed_by)
        severities = {_severity(facts, name, expected) for name in users}
        # Libraries of CUDA are nothing to install on a machine that has no GPU to use them.
        if "problem" in severities or _has_gpu(facts):
            yield _missing(package, libraries, "problem" if "problem" in severities else "note")


def _several_wheels(wheels: Sequence[Wheel]) -> Finding:
    names = sorted({wheel.name for wheel in wheels})
    return Finding(
        "both-wheels-installed",
        "problem",
        f"{', '.join(map(str, wheels))} are installed at once and own the same files: whichever was "
        "installed last is imported, and removing either breaks the other",
        f"pip uninstall -y {' '.join(names)} && pip install {_choose(names)}",
    )


def _broken_import(facts: Facts) -> Finding:
    if facts.wheels:
        text = f"ONNX Runtime cannot be imported: {facts.runtime.error}"
        return Finding("onnxruntime-broken", "problem", text, _reinstall(facts, _wheel_for(facts)))
    wheel = _GPU_WHEEL if facts.gpus or facts.bus_gpus else _CPU_WHEEL
    text = f"no ONNX Runtime is installed: {facts.runtime.error}"
    return Finding("no-onnxruntime", "problem", text, f"pip install {wheel}")


def _wheel_for(facts: Facts) -> str:
    """Returns the one wheel to have: that which is there, or the one with CUDA where there are several."""
    return _choose([wheel.name for wheel in facts.wheels])


def _choose(names: Sequence[str]) -> str:
    if not names:
        return _CPU_WHEEL
    return _GPU_WHEEL if _GPU_WHEEL in names else max(names)


def _reinstall(facts: Facts, wheel: str) -> str:
    names = sorted({wheel, *(there.name for there in facts.wheels)})
    return f"pip uninstall -y {' '.join(names)} && pip install {wheel}"


def _severity(facts: Facts, provider: str, expected: Sequence[str]) -> Severity:
    """A wheel has code for more than a machine can use: that is a problem only where it was to be used."""
    is_needed = provider in expected or provider == CPU or (provider == CUDA and _has_gpu(facts))
    return "problem" if is_needed else "note"


def _has_gpu(facts: Facts) -> bool:
    return bool(facts.gpus or facts.bus_gpus)


def _unusable(facts: Facts, provider: Provider, expected: Sequence[str]) -> Finding:
    severity = _severity(facts, provider.name, expected)
    name = short_name(provider.name)
    text = f"{name}: the wheel lists it, but no session can be made on it: {provider.reason}"
    if severity == "note":
        beside = "there is no GPU here, and " if provider.name == CUDA else ""
        return Finding("provider-unusable", severity, f"{text} ({beside}it was not asked for)")
    return Finding("provider-unusable", severity, text, _hint_for(facts, provider.name))


def _hint_for(facts: Facts, provider: str) -> str:
    if provider != CUDA:
        return (
            "python -c 'import onnxruntime; onnxruntime.print_debug_info()'  "
            f"(what {quoted(provider)} is built with)"
        )
    missing = [library for library in facts.libraries if provider in library.needed_by and library.error]
    packages = sorted({library.package for library in missing if library.package is not None})
    return quoted("pip", "install", *packages) if packages else "nvidia-smi  (does it list the GPU?)"


def _not_in_wheel(facts: Facts, provider: str) -> Finding:
    package = facts.runtime.package or _wheel_for(facts)
    available = ", ".join(map(short_name, facts.runtime.available))
    hint = None
    if provider == CUDA:
        names = sorted({_CPU_WHEEL, *(wheel.name for wheel in facts.wheels)})
        hint = f"pip uninstall -y {quoted(*names)} && pip install '{_GPU_WHEEL}[cuda,cudnn]'"
    return Finding(
        "provider-not-in-wheel",
        "problem",
        f"{short_name(provider)} was asked for, and {package} {facts.runtime.version} has {available} "
        "only: its sessions would run on the CPU",
        hint,
    )


def _missing(package: str, libraries: Sequence[Library], severity: Severity) -> Finding:
    names = ", ".join(library.name for library in libraries)
    providers = dict.fromkeys(short_name(name) for library in libraries for name in library.needed_by)
    text = f"{names} not found, needed by {', '.join(providers)}"
    if libraries[0].package is None:
        return Finding("missing-library", severity, text)
    return Finding(
        "missing-library", severity, f"{text}; {package} brings it", quoted("pip", "install", package)
    )
