"""What a registry's catalogue says of a bundle: a function of the bundle's own two records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.bundle.codec import canonical_json, encode
from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry, LoaderConfig, Variant
from pipeline.bundle.manifest import Manifest
from pipeline.registry.records import PartRecord, PartVariant


def describe_part(manifest: Manifest, config: LoaderConfig, files: tuple[FileEntry, ...]) -> PartRecord:
    """Returns the record of a bundle: a function of its files."""
    return PartRecord(
        model=manifest.name,
        source=manifest.source.sha256,
        spec=manifest.spec_digest,
        created_at=manifest.created_at,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        variants=tuple(describe_variant(variant, manifest.environment) for variant in config.variants),
    )


def describe_variant(variant: Variant, environment: Mapping[str, Any]) -> PartVariant:
    """Returns what a catalogue shows of a variant; equal variants serve the same machines."""
    return PartVariant(
        name=variant.name,
        target=variant.target,
        onnxruntime=str(environment.get("onnxruntime", variant.requirements.onnxruntime.minimum)),
        providers=variant.requirements.providers,
        hardware=_describe_hardware(variant, environment),
    )


def _describe_hardware(variant: Variant, environment: Mapping[str, Any]) -> str:
    """Returns what sets machines apart that a variant runs on; "" if it runs on every one.

    What must be the same for two variants to serve the same machines is what they require; the requirements'
    digest stands for what is too long to say.
    """
    needs = variant.requirements
    if needs.machine is None and not needs.cpu_features and needs.compute_capability is None:
        return ""
    exact = digest_bytes(canonical_json(encode(needs)))[7:15]
    if needs.compute_capability is not None:
        low = ".".join(map(str, needs.compute_capability.minimum))
        return f"{_gpu_name(environment)}compute capability {low} ({exact})"
    return f"{needs.machine or 'any'} with {', '.join(needs.cpu_features[:3]) or 'no extensions'} ({exact})"


def _gpu_name(environment: Mapping[str, Any]) -> str:
    hardware = environment.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    first = gpus[0] if isinstance(gpus, list) and gpus else None
    name = first.get("name") if isinstance(first, Mapping) else None
    return f"{name}, " if isinstance(name, str) and name else ""
