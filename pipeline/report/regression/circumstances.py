"""What else changed between two bundles, besides their figures: what may explain a difference. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.bundle.manifest import Manifest
from pipeline.measuring.shipped import shipped_plan
from pipeline.report.regression.edition import Edition, first_gpu

_VERSIONS = ("onnxruntime", "onnxruntime_build", "onnxruntime_cuda", "python", "system")


@dataclass(frozen=True)
class Difference:
    """Something that is not as it was.

    Attributes:
        what: What it is.
        old: What it was; "" for nothing.
        new: What it is now, likewise.
    """

    what: str
    old: str
    new: str


def list_differences(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Difference, ...]:
    """Returns what two descriptions do not agree in, in their order."""
    return tuple(
        Difference(what, old.get(what, ""), new.get(what, ""))
        for what in dict.fromkeys((*old, *new))
        if old.get(what, "") != new.get(what, "")
    )


def compare_manifests(old: Manifest, new: Manifest) -> tuple[Difference, ...]:
    """Returns what changed for a model as a whole."""
    return list_differences(_describe_manifest(old), _describe_manifest(new))


def _describe_manifest(manifest: Manifest) -> dict[str, str]:
    git = manifest.git
    return {
        "model": manifest.name,
        "source": manifest.source.sha256,
        "spec": manifest.spec_digest,
        "git commit": f"{git.commit}{' (modified)' if git.modified else ''}" if git else "",
        "ortprep": manifest.pipeline_version,
    }


def compare_editions(old: Edition, new: Edition) -> tuple[Difference, ...]:
    """Returns what changed in how a variant was made."""
    return list_differences(_describe_edition(old), _describe_edition(new))


def _describe_edition(edition: Edition) -> dict[str, str]:
    record, environment = edition.record, edition.environment
    verification = record.verification
    return {
        "name": record.name,
        "optimisation level": record.level,
        "shipped plan": shipped_plan(record),
        **_describe_choice(edition),
        "tolerance": f"rtol {verification.rtol:g}, atol {verification.atol:g}",
        "verified on": f"{verification.samples} {verification.inputs} inputs",
        **{what: str(environment[what] or "") for what in _VERSIONS if what in environment},
        **_describe_gpu_software(environment),
        **_describe_packages(environment),
    }


def _describe_choice(edition: Edition) -> dict[str, str]:
    """Returns the options that the search chose; without one they follow from the spec."""
    tuning = edition.record.tuning
    if tuning is None:
        return {}
    chosen = next((trial for trial in tuning.trials if trial.number == tuning.chosen), None)
    choice = chosen.choice if chosen else {}
    return {f"option {knob}": choice[knob] for knob in sorted(choice)}


def _describe_gpu_software(environment: Mapping[str, Any]) -> dict[str, str]:
    gpu = first_gpu(environment)
    names = {"driver": "driver_version", "CUDA of the driver": "cuda_version"}
    return {what: str(gpu[name]) for what, name in names.items() if name in gpu}


def _describe_packages(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages")
    if not isinstance(packages, Mapping):
        return {}
    return {f"package {name}": str(packages[name]) for name in sorted(map(str, packages))}
