"""Requirements of a prepared graph, derived from what is in it and where it was made."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from ortprep.bundle.loader_config import ComputeCapabilityRange, Requirements, VersionRange
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import Option, known_options, version_parts
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.machine.hardware import Hardware, nchwc_block_size
from ortprep.stages.optimize.graph_writer import NCHWC_DOMAIN, ONNX_DOMAINS, SaveResult

_READS = (
    ("1.23", {"": 23, "ai.onnx.ml": 5}, 11),
    ("1.24", {"": 25, "ai.onnx.ml": 5}, 13),
    ("1.25", {"": 26, "ai.onnx.ml": 5}, 13),
)
"""ONNX Runtime version, newest opsets and newest IR version it reads, where one of them changed.

Measured by loading one-node models in 1.23.2, 1.24.4, 1.25.1 and every minor version up to 1.31.
"""

_BLOCK_FEATURES = {16: (("avx2", "avx512f", "fma"), ()), 8: (("avx",), ("avx512f",))}
"""x86 flags that must, and must not, be there for convolutions in blocks of that many channels."""


_EXACT_INTEGERS = ("avx512_vnni", "avx_vnni")
"""x86 flags of processors that add products of 8-bit integers in 32 bits; others saturate at 16 on the way.

https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, "when and why do I need to try
U8U8 and reduce_range".
"""


NO_INTEGERS = "expected a processor with VNNI or AMX: without, sums of 8-bit products saturate"


def find_integer_type(hardware: Hardware) -> Literal["uint8", "int8"] | None:
    """Returns the type of activations that a processor multiplies fast and exactly with int8 weights.

    None is for x86 without VNNI, where sums saturate. AMX comes with VNNI.
    """
    if hardware.machine in ("aarch64", "arm64"):
        return "int8"
    return "uint8" if any(flag in hardware.cpu_features for flag in _EXACT_INTEGERS) else None


def derive_requirements(
    saved: SaveResult,
    options: SessionOptionsRecord,
    providers: tuple[ProviderRecord, ...],
    *,
    portable: bool,
    hardware: Hardware,
    integers: bool = False,
) -> Requirements:
    """Returns what a machine needs to load a graph and answer correctly with it.

    Args:
        saved: Content of the graph.
        options: Session options that it is loaded with.
        providers: Execution providers it is loaded on, in order.
        portable: Whether it has no operators beyond ONNX's own that its source does not have, as the lint
            requires of the portable variant.
        hardware: The machine it was written on.
        integers: Whether the CPU computes its products with 8-bit integers.
    """
    laid_out = NCHWC_DOMAIN in saved.facts.domains
    present, absent = _BLOCK_FEATURES.get(nchwc_block_size(hardware), ((), ())) if laid_out else ((), ())
    # The same block size comes from other flags on other machines: aarch64 has 16 without any of x86's.
    listed = set(hardware.cpu_features)
    # Without these instructions sums of 8-bit products saturate, and what was accurate here is not there.
    exact = next((flag for flag in _EXACT_INTEGERS if integers and flag in listed), None)
    versions = readable_versions(saved, portable=portable)
    return Requirements(
        onnxruntime=with_options(versions, options, providers, installed=saved.onnxruntime),
        providers=tuple(provider.name for provider in providers),
        machine=hardware.machine
        if laid_out or (integers and find_integer_type(hardware) is not None)
        else None,
        cpu_features=(*(flag for flag in present if flag in listed), *((exact,) if exact else ())),
        cpu_features_absent=absent,
        compute_capability=_compute_capabilities(hardware, providers),
    )


def readable_versions(saved: SaveResult, *, portable: bool) -> VersionRange:
    """Returns the ONNX Runtime versions that read a graph; `derive_requirements` has the arguments.

    Operators of ONNX keep their meaning, so any version that knows opset and IR version will do. Operators of
    ONNX Runtime's own promise nothing from one minor version to the next, and the file does not say which
    version wrote it. Where only the source brought them, a newer version reads the graph if it reads the
    source, which is for the source's author to know; an older one may not have them yet.
    """
    major, minor = map(int, saved.onnxruntime.split(".")[:2])
    own = VersionRange(f"{major}.{minor}", f"{major}.{minor + 1}")
    if not ONNX_DOMAINS.issuperset(saved.facts.domains):
        return VersionRange(own.minimum) if portable else own
    for version, newest, newest_ir in _READS:
        reads = all(saved.facts.opsets.get(domain, 0) <= newest[domain] for domain in newest)
        if saved.facts.ir_version <= newest_ir and reads and version_parts(version)[:2] < (major, minor):
            return VersionRange(version)
    return VersionRange(own.minimum)


def with_options(
    versions: VersionRange,
    session_options: SessionOptionsRecord,
    providers: tuple[ProviderRecord, ...],
    *,
    installed: str,
) -> VersionRange:
    """Returns the versions that also have every option a variant is loaded with.

    An older version would ignore a session entry it does not know, without a word.
    """
    used = [*_used(known_options("session", installed), session_options.config_entries)]
    used += [*_used(known_options("attribute", installed), session_options.attributes)]
    for provider in providers:
        used += _used(known_options(provider.name, installed), provider.options)
    return versions._replace(minimum=max((versions.minimum, *used), key=version_parts))


def needs_of_both(first: Requirements, second: Requirements) -> Requirements:
    """Returns what a machine needs for two plans of a model on the same providers."""
    ranges = (first.onnxruntime, second.onnxruntime)
    ends = [versions.below for versions in ranges if versions.below is not None]
    return first._replace(
        onnxruntime=VersionRange(
            max((versions.minimum for versions in ranges), key=version_parts),
            min(ends, key=version_parts, default=None),
        ),
        machine=first.machine or second.machine,
        cpu_features=tuple(dict.fromkeys((*first.cpu_features, *second.cpu_features))),
        cpu_features_absent=tuple(dict.fromkeys((*first.cpu_features_absent, *second.cpu_features_absent))),
    )


def _used(options: Iterable[Option], chosen: Collection[str]) -> list[str]:
    return [option.since for option in options if option.name in chosen]


def _compute_capabilities(
    hardware: Hardware, providers: tuple[ProviderRecord, ...]
) -> ComputeCapabilityRange | None:
    """CUDA's binary compatibility: code for one compute capability runs up to the next major one."""
    ordinals = [int(one.options.get("device_id", "0")) for one in providers if one.name == CUDA]
    if not ordinals or ordinals[0] >= len(hardware.gpus):
        return None
    major, minor = hardware.gpus[ordinals[0]].compute_capability
    return ComputeCapabilityRange(minimum=(major, minor), below=(major + 1, 0))
