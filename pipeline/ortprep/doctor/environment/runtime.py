"""ONNX Runtime and its execution providers: the rows that show them, and the rules that judge them."""

from __future__ import annotations

from collections.abc import Iterator

from ortprep.doctor.diagnosis import Found
from ortprep.doctor.environment.facts import Facts, Row, rule
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_SINCE, TELEMETRY_VARIABLE, is_telemetry_off
from ortprep.versions import parse_version

OLDEST = (1, 23)
"""First version of ONNX Runtime that bundles are loaded with."""

GPU_WHEEL, _CPU_WHEEL = "onnxruntime-gpu", "onnxruntime"

# ONNX Runtime: its wheels and what they import.


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
        device = facts.gpus[0].device
        yield "driver", f"{facts.driver or device.driver_version}, serves CUDA up to {device.cuda_version}"
    elif facts.driver:
        yield "driver", facts.driver
    yield from facts.variables.items()


@rule("both-wheels-installed", "problem")
def _both_wheels(facts: Facts) -> Iterator[Found]:
    if len(facts.wheels) > 1:
        named = ", ".join(f"{name} {version}" for name, version in facts.wheels.items())
        text = (
            f"{named} are installed at once and own the same files: whichever was installed last is "
            "imported, and removing either breaks the other"
        )
        yield Found(text, _reinstall(facts))


@rule("no-onnxruntime", "problem")
def _no_runtime(facts: Facts) -> Iterator[Found]:
    if facts.runtime.error is not None and not facts.wheels:
        wheel = GPU_WHEEL if facts.has_gpu else _CPU_WHEEL
        yield Found(f"no ONNX Runtime is installed: {facts.runtime.error}", f"pip install {wheel}")


@rule("onnxruntime-broken", "problem")
def _broken_import(facts: Facts) -> Iterator[Found]:
    if facts.runtime.error is not None and facts.wheels:
        yield Found(f"ONNX Runtime cannot be imported: {facts.runtime.error}", _reinstall(facts))


@rule("onnxruntime-version-differs", "problem")
def _other_version(facts: Facts) -> Iterator[Found]:
    version = facts.runtime.version
    installed = {parse_version(one) for one in facts.wheels.values()}
    if version and installed and parse_version(version) not in installed:
        name, wheel_version = next(iter(facts.wheels.items()))
        text = f"{name} {wheel_version} is installed, but {version} is imported from {facts.runtime.folder}"
        yield Found(text, _reinstall(facts))


@rule("onnxruntime-too-old", "problem")
def _old_version(facts: Facts) -> Iterator[Found]:
    version = facts.runtime.version
    if version and (parse_version(version) or ()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        text = f"ONNX Runtime {version} is older than {oldest}, the oldest supported"
        yield Found(text, f"pip install --upgrade {_wheel(facts)}")


def _wheel(facts: Facts) -> str:
    """Returns the one wheel to have: that which is there, or the one with CUDA where there are several."""
    return GPU_WHEEL if GPU_WHEEL in facts.wheels else max(facts.wheels, default=_CPU_WHEEL)


def _reinstall(facts: Facts) -> str:
    return f"pip uninstall -y {' '.join(sorted(facts.wheels))} && pip install {_wheel(facts)}"


@rule("usage-data-off", "ok")
def _no_telemetry(facts: Facts) -> Iterator[str]:
    if (value := _telemetry(facts)) is not None and is_telemetry_off(value):
        yield f"ONNX Runtime sends no usage data: {TELEMETRY_VARIABLE}={value} in every process of ortprep"


@rule(
    "usage-data-sent",
    "advice",
    hint=f"export {TELEMETRY_VARIABLE}={TELEMETRY_OFF}   (or unset it: ortprep sets it then)",
)
def _telemetry_on(facts: Facts) -> Iterator[str]:
    if (value := _telemetry(facts)) is not None and not is_telemetry_off(value):
        yield (
            f"ONNX Runtime {facts.runtime.version} sends usage data to its maker, with names of model files "
            f"and hashes of weights, since {TELEMETRY_VARIABLE} is {value!r}"
        )


def _telemetry(facts: Facts) -> str | None:
    """Returns the variable's value in processes of ortprep; None for a version that sends nothing."""
    sends = (parse_version(facts.runtime.version) or ()) >= TELEMETRY_SINCE
    return facts.variables.get(TELEMETRY_VARIABLE, TELEMETRY_OFF) if sends else None


# Execution providers, and the libraries they compute with.


def provider_rows(facts: Facts) -> Iterator[Row]:
    """Yields every execution provider, and why it cannot be used."""
    for name, reason in facts.providers.items():
        yield _short(name), "yes" if reason is None else "no", reason


def library_rows(facts: Facts) -> Iterator[Row]:
    """Yields the libraries of CUDA, and where they come from."""
    for name, file in sorted(facts.runtime.libraries.items()):
        yield name, file or "missing"


@rule("provider-usable", "ok")
def _usable(facts: Facts) -> Iterator[str]:
    for name, reason in facts.providers.items():
        if reason is None:
            yield f"{_short(name)}: a session was made and run"


@rule("provider-unusable", "problem")
def _unusable(facts: Facts) -> Iterator[Found]:
    """A wheel has code for more than a machine can use: that is a problem only where it was to be used."""
    for name, reason in facts.providers.items():
        if reason is None:
            continue
        text = f"{_short(name)}: the wheel lists it, but no session can be made on it: {reason}"
        needed = (*facts.expected, CPU, *([CUDA] if facts.has_gpu else []))
        if name not in needed:
            beside = "there is no GPU here, and " if name == CUDA else ""
            yield Found(f"{text} ({beside}it was not asked for)", severity="note")
        elif name == CUDA:
            is_incomplete = "" in facts.runtime.libraries.values()
            yield Found(text, install_cuda(facts) if is_incomplete else "nvidia-smi  (does it list the GPU?)")
        else:
            what = f"(what {quoted(name)} is built with)"
            yield Found(text, f"python -c 'import onnxruntime; onnxruntime.print_debug_info()'  {what}")


@rule("provider-not-in-wheel", "problem")
def _not_in_wheel(facts: Facts) -> Iterator[Found]:
    runtime = facts.runtime
    available = ", ".join(map(_short, runtime.available))
    for name in facts.expected:
        if runtime.error is None and name not in runtime.available:
            text = (
                f"{_short(name)} was asked for, and {runtime.package or _wheel(facts)} {runtime.version} has "
                f"{available} only: its sessions would run on the CPU"
            )
            yield Found(text, install_cuda(facts) if name == CUDA else None)


@rule("missing-library", "problem")
def _missing_libraries(facts: Facts) -> Iterator[Found]:
    missing = [name for name, file in facts.runtime.libraries.items() if not file]
    # Libraries of CUDA are nothing to install on a machine that has no GPU to use them.
    if missing and (CUDA in facts.expected or facts.has_gpu):
        yield Found(f"not found, needed by CUDA: {', '.join(sorted(missing))}", install_cuda(facts))


def install_cuda(facts: Facts) -> str:
    """Returns the command that installs the wheel with CUDA and the libraries that it was built with."""
    if set(facts.wheels) == {GPU_WHEEL}:
        return f"pip install '{GPU_WHEEL}[cuda,cudnn]=={facts.wheels[GPU_WHEEL]}'"
    names = sorted({_CPU_WHEEL, *facts.wheels})
    return f"pip uninstall -y {quoted(*names)} && pip install '{GPU_WHEEL}[cuda,cudnn]'"


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")
