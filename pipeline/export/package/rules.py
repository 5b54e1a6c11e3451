"""The published rules of a model package, checked on a folder.

Every rule quotes `model_package/README.md` or `onnxruntime/core/session/model_package/README.md` of
microsoft/onnxruntime; the reader is as strict as ONNX Runtime's is by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import read_json
from pipeline.bundle.paths import is_safe_path, resolve_inside
from pipeline.errors import BundleError, ExportError
from pipeline.export.package.settings import FORBIDDEN, PATHS

_MANIFEST_KEYS = frozenset(
    {
        "schema_version",
        "package_name",
        "package_version",
        "description",
        "layout",
        "components",
        "shared_assets",
        "additional_metadata",
    }
)
_COMPONENT_KEYS = frozenset({"component_name", "variants", "additional_metadata"})
_VARIANT_KEYS = frozenset(
    {
        "variant_directory",
        "ep",
        "device",
        "compatibility_string",
        "executor_info",
        "additional_metadata",
    }
)
_DEVICES = frozenset({"cpu", "gpu", "npu"})
_MAJOR = "1"

Json = dict[str, Any]


def check_package(root: Path) -> None:
    """Raises unless a folder is a model package by the published rules.

    Args:
        root: The package's folder.

    Raises:
        ExportError: It is not; the message lists everything that is wrong.
    """
    problems = find_problems(root)
    if problems:
        lines = "\n".join(f"  {one}" for one in problems)
        raise ExportError(f"not a model package by ONNX Runtime's rules: {root}\n{lines}")


def find_problems(root: Path) -> tuple[str, ...]:
    """Returns everything that is wrong with a model package in portable layout, a sentence each.

    Args:
        root: The package's folder.
    """
    if not root.is_dir():
        return ("The package root must be a directory.",)
    try:
        return tuple(_check_manifest(root, read_json(root / "manifest.json")))
    except (BundleError, OSError) as error:
        return (f"manifest.json is required: {error}",)


def _check_manifest(root: Path, manifest: Json) -> Iterator[str]:
    yield from _unknown("manifest.json", manifest, _MANIFEST_KEYS)
    version = manifest.get("schema_version")
    if not isinstance(version, str) or version.partition(".")[0] != _MAJOR:
        yield f'schema_version is required, "<major>.<minor>", and its major gates: got {version!r}'
    for key in ("package_name", "package_version", "description"):
        if not isinstance(manifest.get(key, ""), str):
            yield f"{key} is a string: got {manifest[key]!r}"
    if manifest.get("layout", "portable") != "portable":
        yield f'layout is "portable" for what is shipped: got {manifest["layout"]!r}'
    components = manifest.get("components")
    if not isinstance(components, dict) or not components:
        yield "A package has at least one component."
        return
    for name, value in components.items():
        yield from _check_component_entry(root, name, value)


def _check_component_entry(root: Path, name: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _check_component(root, name, value, home=root)
        return
    if not isinstance(value, str) or not is_safe_path(value):
        yield f"component {name!r}: a path below the package, with / and without ..: got {value!r}"
        return
    path = root / value
    path = path / "component.json" if path.is_dir() else path
    try:
        body = read_json(path)
    except (BundleError, OSError) as error:
        yield f"component {name!r}: its file is read as JSON: {error}"
        return
    yield from _check_component(root, name, body, home=path.parent)


def _check_component(root: Path, name: str, body: Json, *, home: Path) -> Iterator[str]:
    where = f"component {name!r}"
    yield from _unknown(where, body, _COMPONENT_KEYS)
    if not isinstance(body.get("component_name", ""), str):
        yield f"{where}: component_name is a string"
    variants = body.get("variants")
    if not isinstance(variants, dict) or not variants:
        yield f"{where}: A component has at least one variant."
        return
    for variant, value in variants.items():
        if isinstance(value, dict):
            yield from _check_variant(root, f"{where}, variant {variant!r}", variant, value, home)
        else:
            yield f"{where}, variant {variant!r}: an object"


def _check_variant(root: Path, where: str, name: str, body: Json, home: Path) -> Iterator[str]:
    yield from _unknown(where, body, _VARIANT_KEYS)
    for key in ("ep", "device", "compatibility_string"):
        if not isinstance(body.get(key, ""), str):
            yield f"{where}: {key} is a string"
    if body.get("device", "cpu") not in _DEVICES:
        yield f"{where}: device is lower-case cpu, gpu or npu: got {body['device']!r}"
    folder = _inside(root, home, body.get("variant_directory", name), Path.is_dir)
    if folder is None:
        yield f"{where}: A variant always corresponds to a directory on disk."
        return
    infos = body.get("executor_info", {})
    if not isinstance(infos, dict):
        yield f"{where}: executor_info is an object"
        return
    for namespace, info in infos.items():
        payload = _payload(root, folder, info)
        if payload is None:
            yield f"{where}: executor_info[{namespace!r}] is an object, or a path to a file that holds one"
        elif namespace == "ort":
            yield from _check_ort(root, where, folder, payload)


def _payload(root: Path, folder: Path, info: object) -> Json | None:
    if isinstance(info, dict):
        return info
    path = _inside(root, folder, info, Path.is_file)
    try:
        return None if path is None else read_json(path)
    except (BundleError, OSError):
        return None


def _check_ort(root: Path, where: str, folder: Path, payload: Json) -> Iterator[str]:
    model = payload.get("model_file")
    if _inside(root, folder, model, Path.is_file) is None:
        yield f"{where}: model_file is required to load a session, a path in the variant: got {model!r}"
    for field in ("session_options", "provider_options"):
        options = payload.get(field, {})
        if not isinstance(options, dict) or not all(isinstance(one, str) for one in options.values()):
            yield f"{where}: {field} is a map of string to string"
            return
    options = payload.get("session_options", {})
    for key in sorted(FORBIDDEN & options.keys()):
        yield f"{where}: {key} is forbidden in a package"
    for key in sorted(PATHS & options.keys()):
        if _inside(root, folder, options[key], Path.exists) is None:
            yield f"{where}: {key} is a path in the package: got {options[key]!r}"


def _inside(root: Path, base: Path, path: object, is_there: Callable[[Path], bool]) -> Path | None:
    """Returns what a relative path names, links resolved, if it is there and does not leave the package."""
    if not isinstance(path, str) or not is_safe_path(path):
        return None
    try:
        found = resolve_inside(root, (base / path).relative_to(root).as_posix())
    except (BundleError, ValueError):
        return None
    return base / path if is_there(found) else None


def _unknown(where: str, body: Json, known: frozenset[str]) -> Iterator[str]:
    for key in body.keys() - known:
        yield f"{where}: unknown field {key!r}"
