"""Versions of ONNX Runtime, and the commands that install it and ortprep."""

from __future__ import annotations

import functools
from contextlib import suppress

from ortprep.quoting import quoted

_GPU_WHEEL = "onnxruntime-gpu"
_WHEELS = (_GPU_WHEEL, "onnxruntime", "onnxruntime-training", "onnxruntime-openvino", "onnxruntime-directml")

_DIGITS = "0123456789"
# Bounded, so that a hostile file cannot ask for numbers of thousands of digits.
_MAX_PARTS, _MAX_DIGITS = 10, 9


def parse_version(text: str) -> tuple[int, ...] | None:
    """Returns the numeric parts of a version without trailing zeros, or None for what is no version.

    Reading stops at the first thing that is neither digit nor dot: `1.31.0.dev2+cpu` is (1, 31).
    """
    parts: list[int] = []
    for part in text.split(".", _MAX_PARTS)[:_MAX_PARTS]:
        digits = part[: len(part) - len(part.lstrip(_DIGITS))]
        if not 0 < len(digits) <= _MAX_DIGITS:
            break
        parts.append(int(digits))
        if digits != part:
            break
    if not parts:
        return None
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def read_wheels() -> dict[str, str]:
    """Returns the version of every installed distribution that has ONNX Runtime's files, by name."""
    # Imported here: a job that loads from a folder has no use for it, and it takes milliseconds.
    from importlib import metadata

    found = {}
    for name in _WHEELS:
        with suppress(metadata.PackageNotFoundError, KeyError):
            if version := metadata.version(name):  # none of a folder that was left half deleted
                found[name] = version
    return found


_installed = functools.cache(read_wheels)


def installed_onnxruntime() -> str | None:
    """Returns the version of the installed ONNX Runtime without importing it, None if there is none."""
    return next(iter(_installed().values()), None)


def hint_to_install(*extras: str) -> str:
    """Returns the command that installs extras of ortprep, and ONNX Runtime where it is missing or broken.

    Its two wheels own the same files, so the one that is not installed is never proposed beside the other.

    Args:
        extras: `build`, say; `cuda`, which needs the GPU wheel; none where ONNX Runtime cannot be imported.
    """
    wheels = _installed()
    if not wheels:
        return install_command(*(extras if "cuda" in extras else (*extras, "gpu")))
    if len(wheels) > 1 or ("cuda" in extras and _GPU_WHEEL not in wheels):
        return f"pip uninstall -y {quoted(*wheels)} && {install_command(*extras or ('gpu',))}"
    if extras:
        return install_command(*extras)
    ((name, version),) = wheels.items()
    return f"pip install --force-reinstall --no-deps {quoted(f'{name}=={version}')}"


def install_command(*extras: str) -> str:
    """Returns the command that installs extras of ortprep from where the running ortprep came from.

    That is its checkout, or the wheel or repository that pip recorded when it installed ortprep. By its name
    alone pip finds only what a package index has.
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    checkout = _find_checkout()
    if checkout is not None:
        return quoted("pip", "install", "-e", f"{checkout}{wanted}")
    origin = _find_origin()
    return quoted("pip", "install", f"ortprep{wanted} @ {origin}" if origin else f"ortprep{wanted}")


def upgrade_command() -> str:
    """Returns the command that installs a newer ortprep, from where the running ortprep came from."""
    checkout = _find_checkout()
    if checkout is not None:
        return quoted("git", "-C", checkout, "pull")
    return "pip install ortprep-NEWER.whl" if _find_origin() else "pip install --upgrade ortprep"


def _find_checkout() -> str | None:
    """Returns the checkout that this module lies in, None if it is installed."""
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    return str(root) if (root / "pyproject.toml").is_file() else None


def _find_origin() -> str | None:
    """Returns the URL that pip recorded (PEP 610), None for a package that an index had."""
    import json
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError, ValueError, KeyError):
        record = json.loads(metadata.distribution("ortprep").read_text("direct_url.json") or "")
        vcs = record.get("vcs_info")
        return f"{vcs['vcs']}+{record['url']}@{vcs['commit_id']}" if vcs else str(record["url"])
    return None
