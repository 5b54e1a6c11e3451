"""Environments with one version of ONNX Runtime each, made once and kept in the cache folder."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import ortprep
from ortprep.bundle.atomic import new_folder
from ortprep.bundle.digest import digest_json
from ortprep.bundle.file_memory import CACHE_VARIABLE, require_cache_folder
from ortprep.bundle.manifest import Manifest
from ortprep.children.child import Interpreter
from ortprep.errors import InstallationError, SpecError
from ortprep.quoting import quoted

log = logging.getLogger(__name__)

_TIMEOUT_S = 3600.0
_MAX_ERROR_LINES = 8
_VERSION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){1,3}((a|b|rc)[0-9]{1,9})?(\.(post|dev)[0-9]{1,20})?")
_LIST_PATH = "import json, sys; print(json.dumps(sys.path))"
_VENV = "venv"
_UV_OPTIONS = ("--quiet", "--no-config")
"""uv would obey `uv.toml` and `pyproject.toml` of the folder that the user works in, and of all above it."""


def parse_versions(text: str) -> tuple[str, ...]:
    """Returns versions of ONNX Runtime from `1.31.1,1.32.0`; one that is named twice counts once.

    Raises:
        SpecError: One is no version.
    """
    versions = tuple(dict.fromkeys(version.strip() for version in text.split(",")))
    for version in versions:
        # It becomes part of a command line and of a path.
        if not _VERSION.fullmatch(version):
            raise SpecError(
                f"not a version of ONNX Runtime: {version[:80]!r}\n  expected versions as in 1.31.1,1.32.0",
                hint="ortprep upgrade-check NAME --onnxruntime 1.31.1,1.32.0",
            )
    return versions


def list_requirements(manifest: Manifest, version: str, *, gpu: bool) -> tuple[str, ...]:
    """Returns what an environment for a bundle needs, as pip takes it: ONNX Runtime, and this numpy. Pure.

    Args:
        manifest: Record of the bundle. If it was made with NVIDIA's wheels, they are required too.
        version: Version of ONNX Runtime.
        gpu: Whether a variant of the bundle runs on a GPU.
    """
    packages = manifest.environment.get("packages")
    names = packages if isinstance(packages, Mapping) else {}
    has_cuda_wheels = any(str(name).startswith("nvidia-") for name in names)
    wheel = "onnxruntime" if not gpu else f"onnxruntime-gpu{'[cuda,cudnn]' if has_cuda_wheels else ''}"
    return f"{wheel}=={version}", f"numpy=={metadata.version('numpy')}"


def open_environment(requirements: Sequence[str], folder: Path) -> Interpreter:
    """Returns the interpreter of an environment with these packages; makes the environment if needed.

    It imports the standard library, what was installed, and this installation's `ortprep`; nothing else. It
    has an own memory of what was loaded, since that holds one version of ONNX Runtime per bundle.

    Args:
        requirements: Result of `list_requirements`.
        folder: An empty folder that has to last as long as the interpreter is used.

    Raises:
        InstallationError: The environment cannot be made, or a package cannot be installed.
        CacheError: Others could change the environments in the cache folder.
    """
    packages = folder / "packages"
    packages.mkdir(parents=True)
    (packages / ortprep.__name__).symlink_to(Path(ortprep.__file__).resolve().parent)
    environment = _find_environment(requirements)
    path = (str(packages), *environment.path)
    return Interpreter(environment.executable, path, {CACHE_VARIABLE: str(folder / "cache")})


def _find_environment(requirements: Sequence[str]) -> Interpreter:
    """Returns the environment of the cache folder, which is made if it is not there."""
    key = _environment_key(requirements)
    folder = Path(require_cache_folder("environments"), key)
    python = folder / _VENV / "bin" / "python"
    path = _list_path(python)
    if path is None:
        _make(folder, requirements)
        path = _list_path(python)
    if path is None:
        raise InstallationError(f"environment cannot be used: {folder}", hint=f"rm -r {quoted(folder)}")
    return Interpreter(str(python), tuple(path))


def _environment_key(requirements: Sequence[str]) -> str:
    """Returns the name of an environment's folder; how it was installed is part of it."""
    return digest_json([sys.version, sys.executable, *_UV_OPTIONS, *requirements]).rpartition(":")[2][:32]


def _list_path(python: Path) -> list[str] | None:
    """Returns what an environment's interpreter imports from, None if there is none that works."""
    if not python.exists():
        return None
    # Isolated, so that no variable of the user's adds to it.
    done = subprocess.run([python, "-I", "-c", _LIST_PATH], capture_output=True, text=True, check=False)
    return None if done.returncode else [str(entry) for entry in json.loads(done.stdout)]


def _make(folder: Path, requirements: Sequence[str]) -> None:
    """Makes an environment, whole or not at all."""
    names = " ".join(requirements)
    log.info("making an environment with %s", names)
    # ONNX Runtime imports none of its dependencies; the libraries that an extra brings are some.
    options = [] if any("[" in one for one in requirements) else ["--no-deps"]
    uv = shutil.which("uv")
    try:
        with new_folder(folder, durable=False) as unfinished:
            venv = unfinished / _VENV
            python = str(venv / "bin" / "python")
            if uv is not None:
                create = [uv, "venv", *_UV_OPTIONS, "--python", sys.executable, str(venv)]
                install = [uv, "pip", "install", *_UV_OPTIONS, "--python", python]
            else:
                # Isolated, so that no variable of the user's changes what they import.
                create = [sys.executable, "-I", "-m", "venv", str(venv)]
                install = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run(create, what="cannot make an environment", folder=unfinished)
            _run([*install, *options, *requirements], what=f"cannot install {names}", folder=unfinished)
    except OSError as error:
        raise InstallationError(
            f"cannot make an environment: {folder}\n  {error.strerror}",
            hint="set ORTPREP_CACHE_DIR to a folder that can be written to",
        ) from error


def _run(command: Sequence[str], *, what: str, folder: Path) -> None:
    """Runs a command in a folder to its end; raises `InstallationError` with its last lines if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallationError(f"{what}\n  expected an end within {_TIMEOUT_S:g} s: {folder}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-_MAX_ERROR_LINES:]
        output = "".join(f"\n  {line}" for line in lines)
        raise InstallationError(f"{what}{output}", hint="pip index versions onnxruntime")
