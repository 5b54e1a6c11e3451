"""`manifest.json` and `component.json` of a model package, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pipeline
from pipeline.bundle.loader_config import Requirements, Variant
from pipeline.export.exported import ExportedModel
from pipeline.export.package.settings import PackageSettings
from pipeline.runtime.loading.variant_selection import needs_gpu

SCHEMA_VERSION = "1.0"
COMPONENTS = "components"
COMPONENT_FILE = "component.json"
_NAMESPACE = "ortprep"


@dataclass(frozen=True)
class PackagedVariant:
    """A variant of a component.

    Attributes:
        variant: As the bundle records it.
        model_file: Name of the model in the variant's folder.
        settings: What is said of its session.
        exported: What became of it.
        constrain_device: Whether `device` is written, which restricts who is given the variant.
    """

    variant: Variant
    model_file: str
    settings: PackageSettings
    exported: ExportedModel
    constrain_device: bool = False


def build_manifest(name: str, components: Sequence[str]) -> dict[str, Any]:
    """Returns the content of `manifest.json`.

    Args:
        name: Of the package.
        components: Names; each has a folder below `components`.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "package_name": name,
        "layout": "portable",
        "components": {one: f"{COMPONENTS}/{one}" for one in components},
        "additional_metadata": {_NAMESPACE: {"pipeline_version": pipeline.__version__}},
    }


def build_component(name: str, variants: Sequence[PackagedVariant]) -> dict[str, Any]:
    """Returns the content of a `component.json`; ONNX Runtime prefers what comes first."""
    return {
        "component_name": name,
        "variants": {one.variant.name: _describe(one) for one in variants},
    }


def device_of(variant: Variant) -> str:
    """Returns the kind of device a variant runs on, as packages call it."""
    return "gpu" if needs_gpu(variant.requirements) else "cpu"


def compatibility_string(needs: Requirements) -> str:
    """Returns a variant's requirements in one line.

    Such a string is the execution provider's to define; those of CPU and CUDA define none and read none, so
    this one is for people and programs that know it.
    """
    return " ".join(("ortprep/1", *_constraints(needs)))


def _constraints(needs: Requirements) -> Iterator[str]:
    versions = needs.onnxruntime
    yield f"onnxruntime>={versions.minimum}" + (f",<{versions.below}" if versions.below else "")
    if needs.machine is not None:
        yield f"machine={needs.machine}"
    if needs.cpu_features:
        yield f"cpu-features={','.join(needs.cpu_features)}"
    if needs.cpu_features_absent:
        yield f"cpu-features-absent={','.join(needs.cpu_features_absent)}"
    if needs.compute_capability is not None:
        low, below = needs.compute_capability.minimum, needs.compute_capability.below
        yield f"compute-capability>={low[0]}.{low[1]},<{below[0]}.{below[1]}"


def _describe(one: PackagedVariant) -> dict[str, Any]:
    ort: dict[str, Any] = {"model_file": one.model_file}
    if one.settings.session_options:
        ort["session_options"] = dict(one.settings.session_options)
    if one.settings.provider_options:
        ort["provider_options"] = dict(one.settings.provider_options)
    device = {"device": device_of(one.variant)}
    exported = one.exported
    return {
        "variant_directory": one.variant.name,
        "ep": one.variant.providers[0].name,
        **(device if one.constrain_device else {}),
        "compatibility_string": compatibility_string(one.variant.requirements),
        "executor_info": {"ort": ort},
        "additional_metadata": {
            _NAMESPACE: {
                **device,
                "precision": one.variant.precision,
                "prepared_with": exported.prepared_with,
                "source_sha256": exported.source_sha256,
                "needs": list(exported.needs),
                "left_out": [str(left) for left in exported.left_out],
                "files": {entry.path.split("/", 3)[-1]: entry.sha256 for entry in exported.files},
            }
        },
    }
