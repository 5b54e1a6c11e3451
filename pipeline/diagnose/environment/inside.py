"""What is asked of ONNX Runtime from inside: functions that run in child processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.diagnose.environment.elf import read_needed
from pipeline.diagnose.environment.packages import is_known
from pipeline.errors import PipelineError
from pipeline.runtime.availability import run_tiny_model
from pipeline.runtime.loading.session import CUDA

_MAPS = Path("/proc/self/maps")
_PROVIDER_LIBRARIES = "libonnxruntime_providers_*.so"
_MOST_TEXT = 16_384


def describe_runtime(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Imports ONNX Runtime and tries every library its providers compute with.

    Returns:
        `runtime`, the fields of `Runtime`; and `libraries`, each with the fields of `Library`, but for the
        package that brings it.
    """
    try:
        runtime = _describe_import()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return {"runtime": {"error": f"{type(error).__name__}: {error}"}, "libraries": []}
    folder = Path(runtime["folder"])
    needed = _collect_needed(folder / "capi", runtime["available"])
    return {
        "runtime": runtime,
        "libraries": [_try_library(name, folder, who) for name, who in needed.items()],
    }


def try_provider(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes and runs a session on a provider.

    Args:
        request: `provider`, its name.

    Returns:
        `failure`: what was raised, None if nothing was; `said`: what ONNX Runtime and the libraries printed;
        `maps`: the files this process had mapped in the end.
    """
    failure = None
    with _captured() as read_output:
        try:
            run_tiny_model(request)
        except PipelineError as error:
            failure = error.message
        said = read_output()
    return {"failure": failure, "said": said, "maps": _mapped_files()}


def _describe_import() -> dict[str, Any]:
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)  # since 1.21
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            # What it says of libraries it does not find is found out for each of them below.
            preload()
    return {
        "version": onnxruntime.__version__,
        "package": str(getattr(onnxruntime, "package_name", "")),
        "cuda_version": str(getattr(onnxruntime, "cuda_version", "") or ""),
        "build_info": onnxruntime.get_build_info(),
        "folder": str(Path(onnxruntime.__file__).parent),
        "available": list(onnxruntime.get_available_providers()),
    }


def _collect_needed(folder: Path, available: list[str]) -> dict[str, dict[str, list[str]]]:
    """Returns by library which providers link to it, and which open it when they need it."""
    needed: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob(_PROVIDER_LIBRARIES)):
        stem = file.stem.removeprefix("libonnxruntime_providers_")
        provider = next((name for name in available if name.lower() == f"{stem}executionprovider"), None)
        if provider is None:
            continue
        for name in filter(is_known, read_needed(file)):
            needed.setdefault(name, {"linked_by": [], "opened_by": []})["linked_by"].append(provider)
    for name in _opened_when_used(available):
        users = needed.setdefault(name, {"linked_by": [], "opened_by": []})
        if CUDA not in users["linked_by"]:
            users["opened_by"].append(CUDA)
    return needed


def _opened_when_used(available: list[str]) -> list[str]:
    """What ONNX Runtime preloads of CUDA and cuDNN, linked to or not: 1.31 opens some at their first use."""
    import onnxruntime

    list_paths: Callable[[bool], list[tuple[str, ...]]] | None
    list_paths = getattr(onnxruntime, "_get_nvidia_dll_paths", None)
    if list_paths is None or CUDA not in available:
        return []
    return [path[-1] for path in list_paths(False)]


def _try_library(name: str, folder: Path, who: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, **who, "file": None, "version": None, "error": None}
    beside = folder / "capi" / name
    try:
        library = ctypes.CDLL(str(beside) if beside.exists() else name)
    except OSError as error:
        return {**found, "error": str(error)}
    return {**found, "file": _file_of(name), "version": _version_of(library, name)}


def _version_of(library: ctypes.CDLL, name: str) -> str | None:
    stem = name.partition(".so")[0]
    read = {"libcudart": _read_cuda_runtime, "libcudnn": _read_cudnn, "libcublas": _read_cublas}.get(stem)
    try:
        return None if read is None else read(library)
    except AttributeError:
        return None


def _read_cuda_runtime(library: ctypes.CDLL) -> str | None:
    version = ctypes.c_int(0)
    if library.cudaRuntimeGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _read_cudnn(library: ctypes.CDLL) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    version = int(library.cudnnGetVersion())
    # 8902 is 8.9.2; since 9.0 there are two digits more.
    major_unit, minor_unit = (10_000, 100) if version >= 90_000 else (1000, 100)
    return f"{version // major_unit}.{version % major_unit // minor_unit}.{version % minor_unit}"


def _read_cublas(library: ctypes.CDLL) -> str | None:
    parts = [ctypes.c_int(0) for _ in range(3)]
    if any(library.cublasGetProperty(which, ctypes.byref(part)) for which, part in enumerate(parts)):
        return None
    return ".".join(str(part.value) for part in parts)


def _file_of(name: str) -> str | None:
    stem = name.partition(".so")[0]
    return next((file for file in _mapped_files() if Path(file).name.partition(".so")[0] == stem), None)


def _mapped_files() -> list[str]:
    """Returns the shared libraries this process has mapped, each once."""
    lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    files = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return list(dict.fromkeys(file for file in files if ".so" in Path(file).name))


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Sends what this process prints, C++ included, to a file; gives a function that reads it."""
    saved = [os.dup(handle) for handle in (1, 2)]
    with tempfile.TemporaryFile() as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
        try:
            yield lambda: os.pread(file.fileno(), _MOST_TEXT, 0).decode(errors="replace")
        finally:
            for handle, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, handle)
                os.close(copy)
