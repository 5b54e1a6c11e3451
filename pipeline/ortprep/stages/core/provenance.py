"""Provenance: versions of tools and hardware, and the commit of a spec."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.paths import resolve_inside
from ortprep.errors import IntegrityError

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Distributions of ONNX Runtime. One version of both is not one tool: they compute with other libraries."""

CUDA_LIBRARIES = tuple(
    f"nvidia-{library}{suffix}"
    for library in ("cublas", "cudnn", "cufft", "cuda-runtime")
    for suffix in ("", "-cu12", "-cu13")
)
"""Wheels that may bring the libraries that ONNX Runtime computes with on CUDA."""


def installed_versions(*packages: str) -> Mapping[str, str]:
    """Returns the versions of those packages that are installed, for a task's key."""
    versions = {package: installed_version(package) for package in packages}
    return {package: version for package, version in versions.items() if version is not None}


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def runtime_versions(target: str, *others: str) -> Mapping[str, str]:
    """Returns the versions of what a model is run with on `cpu` or `cuda`, and of other packages."""
    libraries = CUDA_LIBRARIES if target == "cuda" else ()
    return installed_versions(*ONNXRUNTIME, *libraries, *others)


_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MAX_GIT_BYTES = 16 * 1024 * 1024


def read_spec_commit(folder: Path) -> str | None:
    """Returns the commit that is checked out where a spec lies, None if its folder is in no repository.

    It reads git's files and never runs git, which obeys the configuration of the folder it is pointed at:
    `core.fsmonitor` names a program. Only the nearest `.git` counts, never a bare repository that lies there
    as ordinary files; and, as for git, only if this user or root owns it, since in a folder such as `/tmp`
    anyone can put one above others' folders. Layout: https://git-scm.com/docs/gitrepository-layout.
    """
    try:
        real = folder.resolve()
        git = next((path / ".git" for path in (real, *real.parents) if (path / ".git").exists()), None)
        return None if git is None else _read_head(git)
    except (OSError, RuntimeError, ValueError, IntegrityError):
        return None


def _read_head(git: Path) -> str | None:
    _check_owner(git)
    if git.is_file():  # of a worktree or a submodule: it names the folder
        git = git.parent / _read_text(git).removeprefix("gitdir:").strip()
        _check_owner(git)
    shared = git / _read_text(git / "commondir").strip() if (git / "commondir").exists() else git
    if not ((shared / "objects").is_dir() and (shared / "refs").is_dir()):
        return None
    head = _read_text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else None
    branch = head.removeprefix("ref:").strip()
    loose = resolve_inside(shared, branch)
    if loose.is_file():
        commit = _read_text(loose).strip()
        return commit if _COMMIT.fullmatch(commit) else None
    lines = (line.split() for line in _read_text(shared / "packed-refs").splitlines())
    return next((line[0] for line in lines if line[1:] == [branch] and _COMMIT.fullmatch(line[0])), None)


def _check_owner(git: Path) -> None:
    if git.lstat().st_uid not in (0, os.geteuid()):
        raise PermissionError(f"another user's repository: {git}")


def _read_text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_MAX_GIT_BYTES).decode()


_PACKAGES = ("onnx", "numpy", *ONNXRUNTIME, "doit", *CUDA_LIBRARIES)


def describe_environment(request: None) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Child function: returns versions and hardware as JSON types; imports ONNX Runtime."""
    import onnxruntime

    from ortprep.runtime.machine.hardware import read_hardware

    return {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime_build": onnxruntime.get_build_info(),
        "onnxruntime_cuda": getattr(onnxruntime, "cuda_version", "") or None,
        "packages": dict(installed_versions(*_PACKAGES)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "hardware": encode(read_hardware()),
    }
