"""Functions that ask ONNX Runtime about itself, each in a child process."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.children.availability import run_tiny_model
from ortprep.doctor.environment.facts.elf import read_needed
from ortprep.doctor.environment.facts.packages import is_known
from ortprep.doctor.environment.facts.records import InstalledRuntime, Library
from ortprep.errors import PipelineError
from ortprep.runtime.loading.session import CUDA

_MAPS = Path("/proc/self/maps")
_PROVIDER_LIBRARIES = "libonnxruntime_providers_*.so"
_MAX_TEXT_BYTES = 16_384


@dataclass(frozen=True)
class ProviderAttempt:
    """An attempt to make and run a session on a provider.

    Attributes:
        failure: Message of the error; None if there was none.
        output: Text that ONNX Runtime and the libraries printed.
    """

    failure: str | None
    output: str


def describe_runtime(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Imports ONNX Runtime and tries every library its providers compute with.

    Returns:
        `runtime`, the fields of `InstalledRuntime`; and `libraries`, the fields of each `Library`, without
        its package.
    """
    try:
        runtime = _describe_import()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return {"runtime": {"error": f"{type(error).__name__}: {error}"}, "libraries": []}
    folder = Path(runtime.folder) / "capi"
    libraries = [_try_library(library, folder) for library in _list_needed(folder, runtime.available)]
    return {"runtime": encode(runtime), "libraries": encode(libraries)}


def try_provider(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes and runs a session on a provider.

    Returns:
        The fields of `ProviderAttempt`.
    """
    failure = None
    with _captured() as read_output:
        try:
            run_tiny_model(request)
        except PipelineError as error:
            failure = error.message
        output = read_output()
    return dict(encode(ProviderAttempt(failure, output)))


def _describe_import() -> InstalledRuntime:
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)  # since 1.21
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            # It prints the libraries that it does not find; each of them is tried below.
            preload()
    return InstalledRuntime(
        version=onnxruntime.__version__,
        package=str(getattr(onnxruntime, "package_name", "")),
        cuda_version=str(getattr(onnxruntime, "cuda_version", "") or ""),
        build_info=onnxruntime.get_build_info(),
        folder=str(Path(onnxruntime.__file__).parent),
        available=tuple(onnxruntime.get_available_providers()),
    )


def _list_needed(folder: Path, available: Sequence[str]) -> list[Library]:
    """Returns the libraries that providers link to, and those that CUDA opens when it needs them."""
    needed_by: dict[str, tuple[str, ...]] = {}
    for file in sorted(folder.glob(_PROVIDER_LIBRARIES)):
        stem = file.stem.removeprefix("libonnxruntime_providers_")
        provider = next((name for name in available if name.lower() == f"{stem}executionprovider"), None)
        for name in filter(is_known, read_needed(file) if provider else ()):
            needed_by[name] = (*needed_by.get(name, ()), str(provider))
    for name in _opened_when_used(available):
        needed_by[name] = tuple(dict.fromkeys((*needed_by.get(name, ()), CUDA)))
    return [Library(name, providers) for name, providers in needed_by.items()]


def _opened_when_used(available: Sequence[str]) -> list[str]:
    """Returns the CUDA and cuDNN libraries that ONNX Runtime preloads: 1.31 opens some at their first use."""
    import onnxruntime

    list_paths: Callable[[bool], list[tuple[str, ...]]] | None
    list_paths = getattr(onnxruntime, "_get_nvidia_dll_paths", None)
    if list_paths is None or CUDA not in available:
        return []
    return [path[-1] for path in list_paths(False)]


def _try_library(library: Library, folder: Path) -> Library:
    name = library.name
    beside = folder / name
    try:
        loaded = ctypes.CDLL(str(beside) if beside.exists() else name)
    except OSError as error:
        return replace(library, error=str(error))
    return replace(library, file=_file_of(name), version=_version_of(loaded, name))


def _version_of(library: ctypes.CDLL, name: str) -> str | None:
    stem = name.partition(".so")[0]
    read = {"libcudart": _read_cuda_runtime, "libcudnn": _read_cudnn}.get(stem)
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


def _file_of(name: str) -> str | None:
    stem = name.partition(".so")[0]
    return next((file for file in _mapped_files() if Path(file).name.partition(".so")[0] == stem), None)


def _mapped_files() -> tuple[str, ...]:
    """Returns the shared libraries this process has mapped, each once."""
    lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    files = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return tuple(dict.fromkeys(file for file in files if ".so" in Path(file).name))


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Sends what this process prints, C++ included, to a file; gives a function that reads it."""
    saved = [os.dup(handle) for handle in (1, 2)]
    with tempfile.TemporaryFile() as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
        try:
            yield lambda: os.pread(file.fileno(), _MAX_TEXT_BYTES, 0).decode(errors="replace")
        finally:
            for handle, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, handle)
                os.close(copy)
