"""Everything that is read of a machine and its ONNX Runtime.

ONNX Runtime is tried in child processes: imported, and a session made on every provider.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ortprep.children.availability import run_tiny_model
from ortprep.children.bytecode import Bytecode, read_bytecode
from ortprep.children.child import read_own_output, run_child
from ortprep.errors import ChildError, PipelineError
from ortprep.runtime.machine.hardware import Gpu, Hardware, read_hardware
from ortprep.runtime.machine.processor import group_folders, read_quota, read_text
from ortprep.tables import CellValue
from ortprep.telemetry import TELEMETRY_VARIABLE
from ortprep.versions import read_wheels

_SHARED_MEMORY = Path("/dev/shm")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE"),
    *("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", TELEMETRY_VARIABLE),
)
"""Environment variables that change which libraries are loaded, what is seen, compiled or sent."""

_TIMEOUT_S = 120.0
_MAX_TEXT_BYTES = 16_384
_NO_LIMIT = 2**60
"""Version 1 of control groups writes a number of bytes near 2**63 where there is no limit."""
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
class ResourceLimits:
    """Resources that this process may use, as control groups limit them.

    Attributes:
        quota_cores: Processor time its control groups grant, in cores; None for no limit.
        periods: Scheduling periods in which the limited group wanted to run.
        throttled_periods: Those of them in which it was stopped for having used up its share.
        memory_bytes: Memory its control groups grant, None for no limit.
    """

    quota_cores: float | None = None
    periods: int = 0
    throttled_periods: int = 0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class InstalledRuntime:
    """The ONNX Runtime that is imported, or the error of the import.

    Attributes:
        version: `onnxruntime.__version__`, "" if the import failed.
        package: The wheel it says it was built as, "" where it does not say.
        cuda_version: CUDA it was built with (`13.0`), "" for none.
        build_info: Text of `onnxruntime.get_build_info()`.
        folder: Folder of the import package.
        available: Execution providers the wheel has code for; nothing says that they work.
        error: Message of the failed import; None if it succeeded.
        bytecode: What of the import was compiled.
    """

    version: str = ""
    package: str = ""
    cuda_version: str = ""
    build_info: str = ""
    folder: str = ""
    available: tuple[str, ...] = ()
    error: str | None = None
    bytecode: Bytecode = field(default_factory=Bytecode)


@dataclass(frozen=True)
class DiskSpace:
    """A file system.

    Attributes:
        path: A folder on it.
        total_bytes: Size of the file system.
        free_bytes: Space that this user may still write.
    """

    path: str
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """A machine, and what is expected of it.

    Attributes:
        wheels: Versions of the distributions that bring the import package `onnxruntime`, by name.
        runtime: The ONNX Runtime that is imported.
        providers: Reason why a provider cannot be used, None for one that can, by name.
        gpus: CUDA devices this process can use.
        hardware: Processor, cores and memory.
        limits: Limits of this process's control group.
        shared_memory: `/dev/shm`; its size is 0 if there is none.
        artifacts: The file system bundles are on.
        variables: Environment variables that change what is loaded.
        expected: Full names of the execution providers that were asked for.
    """

    wheels: Mapping[str, str]
    runtime: InstalledRuntime
    providers: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]
    hardware: Hardware
    limits: ResourceLimits
    shared_memory: DiskSpace
    artifacts: DiskSpace
    variables: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()


Row: TypeAlias = tuple[CellValue, ...]
"""A row of a topic's table."""


def read_facts(*, artifacts: Path, expected: Sequence[str] = ()) -> Facts:
    """Reads everything that findings are based on; makes a session on every provider.

    Args:
        artifacts: Folder of the bundles, there or not.
        expected: Full names of the execution providers that were asked for.

    Raises:
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    hardware, runtime = read_hardware(), read_runtime()
    return Facts(
        wheels=read_wheels(),
        runtime=runtime,
        providers=try_providers(runtime.available),
        gpus=hardware.gpus,
        hardware=hardware._replace(gpus=()),
        limits=read_limits(),
        shared_memory=read_disk_space(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else DiskSpace("/dev/shm"),
        artifacts=read_disk_space(artifacts.absolute()),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        expected=tuple(expected),
    )


def read_disk_space(folder: Path) -> DiskSpace:
    """Reads the size of the file system that a folder is on, or will be on once it is made."""
    usage = shutil.disk_usage(next(level for level in (folder, *folder.parents) if level.is_dir()))
    return DiskSpace(str(folder), usage.total, usage.free)


def read_runtime() -> InstalledRuntime:
    """Imports ONNX Runtime in a child."""
    try:
        return run_child(describe_runtime, None, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return InstalledRuntime(error=_one_line(error.message))


def try_providers(names: Sequence[str]) -> dict[str, str | None]:
    """Makes a session on each provider in a fresh process; returns why it cannot be used, None if it can."""
    return {name: _try(name) for name in names if name not in _WITHOUT_KERNELS}


def _try(name: str) -> str | None:
    try:
        failure, output = run_child(try_provider, name, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return _one_line(error.message)
    return None if failure is None else parse_reason(failure, output)


def describe_runtime(_: None) -> InstalledRuntime:
    """Imports ONNX Runtime; runs in a child."""
    try:
        import onnxruntime

        return InstalledRuntime(
            version=onnxruntime.__version__,
            package=str(getattr(onnxruntime, "package_name", "")),
            cuda_version=str(getattr(onnxruntime, "cuda_version", "") or ""),
            build_info=onnxruntime.get_build_info(),
            folder=str(Path(onnxruntime.__file__).parent),
            available=tuple(onnxruntime.get_available_providers()),
            bytecode=read_bytecode(),
        )
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return InstalledRuntime(error=f"{type(error).__name__}: {error}")


def try_provider(name: str) -> tuple[str | None, str]:
    """Makes and runs a session on a provider, in a child; returns its error or None, and what was printed."""
    failure = None
    try:
        run_tiny_model(name)
    except PipelineError as error:
        failure = error.message
    return failure, read_own_output(_MAX_TEXT_BYTES)


def parse_reason(failure: str, output: str) -> str:
    """Returns why a provider was not obtained, in one line.

    ONNX Runtime prints the cause, and raises only that there is one.
    """
    for source in (_COLOURS.sub("", output), failure):
        for cause in _CAUSES:
            if match := cause.search(source):
                return _one_line(match["cause"])
    # The first line names a model that the user does not know of.
    return _one_line(failure.partition("\n")[2] or failure)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def read_limits(root: Path = Path("/")) -> ResourceLimits:
    """Reads what this process may use of the machine; of several levels of groups the strictest counts."""
    files = [
        f"{folder}/{name}"
        for folder in group_folders(str(root), "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [int(text) for file in files if (text := read_text(file)).isdigit() and int(text) < _NO_LIMIT]
    folders = group_folders(str(root), "cpu")
    quotas = [(cores, folder) for folder in folders if (cores := read_quota(folder)) is not None]
    cores, folder = min(quotas, default=(None, None))
    statistics = "" if folder is None else read_text(f"{folder}/cpu.stat")
    counts = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return ResourceLimits(
        quota_cores=cores,
        periods=int(counts.get("nr_periods", 0)),
        throttled_periods=int(counts.get("nr_throttled", 0)),
        memory_bytes=min(limits, default=None),
    )
