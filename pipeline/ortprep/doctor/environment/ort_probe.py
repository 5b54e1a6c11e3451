"""The installed ONNX Runtime, tried in child processes: imported, and a session made on every provider."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ortprep.children.availability import run_tiny_model
from ortprep.children.child import run_child
from ortprep.doctor.output_capture import output_to, read_start
from ortprep.errors import ChildError, PipelineError
from ortprep.runtime.loading.session import CUDA

_TIMEOUT_S = 120.0
_MAX_TEXT_BYTES = 16_384
_MAPS = Path("/proc/self/maps")
_WITHOUT_KERNELS = frozenset({"AzureExecutionProvider"})
"""Providers that compute nothing on this machine; the CPU wheel lists one that sends inputs elsewhere."""

_CAUSES = (
    re.compile(r"Failed to load library \S+ with error: (?P<cause>[^\n]+)"),
    re.compile(r"(?P<cause>(?:CUDA|CUDNN|CUBLAS) failure \d+: [^;\n]+)"),
    re.compile(r"(?P<cause>Please install [^\n]+)"),
    re.compile(r"(?P<cause>Failed to create \w+ExecutionProvider[^\n]*)"),
)
"""Messages in which ONNX Runtime says why a provider is missing, the most specific first."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class InstalledRuntime:
    """The ONNX Runtime that is imported, or the error of the import.

    Attributes:
        version: `onnxruntime.__version__`, "" if the import failed.
        package: The wheel it says it was built as, "" where it does not say.
        cuda_version: CUDA it was built with (`13.0`), "" for none.
        build_info: `onnxruntime.get_build_info()`.
        folder: Folder of the import package.
        available: Execution providers the wheel has code for; nothing says that they work.
        libraries: Files of the CUDA libraries that it loads ahead, by name; "" for one that is not found.
        error: Why the import failed, None if it did not.
    """

    version: str = ""
    package: str = ""
    cuda_version: str = ""
    build_info: str = ""
    folder: str = ""
    available: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ProviderAttempt:
    """An attempt to make and run a session on a provider.

    Attributes:
        failure: Message of the error; None if there was none.
        output: Text that ONNX Runtime and the libraries printed.
    """

    failure: str | None
    output: str


def read_runtime() -> InstalledRuntime:
    """Imports ONNX Runtime in a child, and has it load the libraries that CUDA computes with."""
    try:
        return run_child(describe_runtime, None, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return InstalledRuntime(error=_one_line(error.message))


def try_providers(names: Sequence[str]) -> dict[str, str | None]:
    """Makes a session on each provider in a fresh process; returns why it cannot be used, None if it can."""
    return {name: _try(name) for name in names if name not in _WITHOUT_KERNELS}


def _try(name: str) -> str | None:
    try:
        attempt = run_child(try_provider, name, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return _one_line(error.message)
    return parse_reason(attempt)


def describe_runtime(_: None) -> InstalledRuntime:
    """Imports ONNX Runtime and loads CUDA's libraries as it does; runs in a child."""
    try:
        import onnxruntime

        with contextlib.redirect_stdout(io.StringIO()):
            # It prints the libraries that it does not find; each of them is tried below.
            getattr(onnxruntime, "preload_dlls", lambda: None)()  # since 1.21
        return InstalledRuntime(
            version=onnxruntime.__version__,
            package=str(getattr(onnxruntime, "package_name", "")),
            cuda_version=str(getattr(onnxruntime, "cuda_version", "") or ""),
            build_info=onnxruntime.get_build_info(),
            folder=str(Path(onnxruntime.__file__).parent),
            available=tuple(onnxruntime.get_available_providers()),
            libraries=_try_libraries(),
        )
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return InstalledRuntime(error=f"{type(error).__name__}: {error}")


def try_provider(name: str) -> ProviderAttempt:
    """Makes and runs a session on a provider; runs in a child."""
    # The child's folder for temporary files goes with it.
    failure, output = None, Path(tempfile.gettempdir(), "provider-output")
    with output_to(output):
        try:
            run_tiny_model({"provider": name})
        except PipelineError as error:
            failure = error.message
    return ProviderAttempt(failure, read_start(output, _MAX_TEXT_BYTES))


def _try_libraries() -> dict[str, str]:
    """Returns the files of the libraries that CUDA loads ahead, or from 1.31 on at their first use."""
    import onnxruntime

    # The list is no part of ONNX Runtime's interface: a version may lack it.
    list_paths = getattr(onnxruntime, "_get_nvidia_dll_paths", None)
    if list_paths is None or CUDA not in onnxruntime.get_available_providers():
        return {}
    names = [path[-1] for path in list_paths(False)]
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
    lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    stems = {Path(file).name.partition(".so")[0]: file for file in mapped}
    return {name: stems.get(name.partition(".so")[0], "") for name in names}


def parse_reason(attempt: ProviderAttempt) -> str | None:
    """Returns why a provider was not obtained, in one line; None if it was.

    ONNX Runtime prints the cause, and raises only that there is one.
    """
    if attempt.failure is None:
        return None
    for source in (_COLOURS.sub("", attempt.output), attempt.failure):
        for cause in _CAUSES:
            if match := cause.search(source):
                return _one_line(match["cause"])
    # The first line names a model that the user does not know of.
    return _one_line(attempt.failure.partition("\n")[2] or attempt.failure)


def _one_line(text: str) -> str:
    return " ".join(text.split())
