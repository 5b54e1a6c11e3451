"""Where models were prepared and measured: equal environments appear once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortprep.bundle.digest import digest_json
from ortprep.bundle.manifest import Manifest
from ortprep.report.content import ReportSection
from ortprep.report.formatting import format_mb, join_words, make_table

_BYTES = "_bytes"


def build_environment_sections(manifests: Sequence[Manifest]) -> tuple[ReportSection, ...]:
    """Returns a section per distinct environment, with the models that are from it."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for manifest in manifests:
        environment = manifest.environment
        found.setdefault(digest_json(environment), (environment, []))[1].append(manifest.name)
    return tuple(_section(environment, list(dict.fromkeys(owners))) for environment, owners in found.values())


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Returns processor or GPU, cores and ONNX Runtime in a few words."""
    hardware = environment.get("hardware")
    hardware = hardware if isinstance(hardware, Mapping) else {}
    gpus = [str(gpu.get("name")) for gpu in hardware.get("gpus") or () if isinstance(gpu, Mapping)]
    cores = hardware.get("cores")
    parts = [
        str(hardware.get("cpu_model") or ""),
        f"{cores} cores" if cores else "",
        join_words(gpus),
        f"ONNX Runtime {environment['onnxruntime']}" if "onnxruntime" in environment else "",
    ]
    return ", ".join(part for part in parts if part) or "not recorded"


def _section(environment: Mapping[str, Any], owners: Sequence[str]) -> ReportSection:
    columns = ("what", "~value")
    rows = tuple((name, text) for name, text in _flatten(environment, ""))
    table = make_table("Versions and hardware", columns, rows)
    return ReportSection(
        describe_machine(environment), (f"Prepared here: {join_words(owners)}.",), tables=(table,), quiet=True
    )


def _flatten(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from _flatten(item, f"{name}.{index}")
        else:
            yield name, " ".join(map(str, value))
    elif value is not None:
        if name.endswith(_BYTES) and isinstance(value, int):
            yield name, f"{value} ({format_mb(value)})"
        else:
            yield name, str(value)
