"""What a version of a bundle ships, variant by variant, and what differs between two of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.shipped import shipped_plan

PORTABLE = "portable"


@dataclass(frozen=True)
class VariantSnapshot:
    """A variant of a bundle.

    Attributes:
        base: Its name where it was prepared; a bundle from several machines may name it otherwise.
        environment: Versions and hardware it was made with.
        size_bytes: Size of the files that a session reads; None without files.
    """

    name: str
    record: VariantRecord
    environment: Mapping[str, Any]
    size_bytes: int | None


def list_snapshots(manifests: Sequence[Manifest]) -> tuple[VariantSnapshot, ...]:
    """Returns the variants of a version's bundles, in order.

    If equal machines prepared a variant of one name, only that of the first bundle is there.
    """
    found: dict[tuple[str, ...], VariantSnapshot] = {}
    for manifest in manifests:
        machine = tuple(str(manifest.environment.get(name)) for name in ("onnxruntime", "hardware"))
        for record in manifest.variants:
            number = 1 + sum(one.record.name == record.name for one in found.values())
            name = record.name if number == 1 else f"{record.name} ({number})"
            found.setdefault((record.name, *machine), _snapshot(name, record, manifest))
    return tuple(found.values())


def _snapshot(name: str, record: VariantRecord, manifest: Manifest) -> VariantSnapshot:
    # Where the portable variant was faster, its files are all there is.
    folder = PORTABLE if shipped_plan(record) == PORTABLE else record.name
    sizes = [entry.size_bytes for entry in manifest.files if entry.path.startswith(f"{folder}/")]
    return VariantSnapshot(name, record, manifest.environment, sum(sizes) if sizes else None)


def read_hardware_facts(snapshot: VariantSnapshot) -> dict[str, str]:
    """Returns the hardware that a snapshot's figures depend on, by what it is; {} if it was not recorded."""
    hardware = snapshot.environment.get("hardware")
    if not isinstance(hardware, Mapping):
        return {}
    facts = {
        "architecture": str(hardware.get("machine", "?")),
        "processor": str(hardware.get("cpu_model") or "?"),
        "cores": str(hardware.get("cores", "?")),
    }
    if snapshot.record.target != "cpu":
        gpu = first_gpu(snapshot.environment)
        facts["GPU"] = f"{gpu.get('name', '?')}, compute capability {_capability(gpu)}" if gpu else "none"
    return facts


def first_gpu(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what was recorded of the GPU that was measured on; {} if there was none."""
    hardware = environment.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    first = gpus[0] if isinstance(gpus, list | tuple) and gpus else None
    return first if isinstance(first, Mapping) else {}


def _capability(gpu: Mapping[str, Any]) -> str:
    found = gpu.get("compute_capability")
    return ".".join(map(str, found)) if isinstance(found, list | tuple) else "?"


def pair_snapshots(
    old: Sequence[VariantSnapshot], new: Sequence[VariantSnapshot]
) -> Iterator[tuple[VariantSnapshot | None, VariantSnapshot | None]]:
    """Yields (old, new) for every variant: same target and name, preferably the same hardware.

    One side is None where a variant has no counterpart. Old variants come first.
    """
    partners: dict[int, int] = {}
    for fits in (_is_same_on_same_hardware, _is_same):
        for index, before in enumerate(old):
            if index not in partners:
                matched = partners.values()
                free = ((i, after) for i, after in enumerate(new) if i not in matched)
                match = next((i for i, after in free if fits(before, after)), None)
                if match is not None:
                    partners[index] = match
    for index, before in enumerate(old):
        yield before, new[partners[index]] if index in partners else None
    for index, after in enumerate(new):
        if index not in partners.values():
            yield None, after


def _is_same(one: VariantSnapshot, other: VariantSnapshot) -> bool:
    return (one.record.target, one.record.name) == (other.record.target, other.record.name)


def _is_same_on_same_hardware(one: VariantSnapshot, other: VariantSnapshot) -> bool:
    return _is_same(one, other) and read_hardware_facts(one) == read_hardware_facts(other)


@dataclass(frozen=True)
class Difference:
    """Something that is not as it was.

    Attributes:
        old: What it was; "" for nothing.
        new: What it is now; "" for nothing.
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
    return {
        "model": manifest.name,
        "source": manifest.source.sha256,
        "spec": manifest.spec_digest,
        "git commit": manifest.spec_commit or "",
        "ortprep": manifest.pipeline_version,
    }


def compare_snapshots(old: VariantSnapshot, new: VariantSnapshot) -> tuple[Difference, ...]:
    """Returns what changed in how a variant was made."""
    return list_differences(_describe_snapshot(old), _describe_snapshot(new))


def _describe_snapshot(snapshot: VariantSnapshot) -> dict[str, str]:
    record, environment = snapshot.record, snapshot.environment
    verification, gpu = record.verification, first_gpu(environment)
    return {
        "name": record.name,
        "optimisation level": record.level,
        "shipped plan": shipped_plan(record),
        **_describe_choice(snapshot),
        "tolerance": f"rtol {verification.rtol:g}, atol {verification.atol:g}",
        "verified on": f"{verification.samples} {verification.inputs} inputs",
        **dict(_flatten({name: value for name, value in environment.items() if name != "hardware"})),
        **{f"GPU {name}": text for name, text in _flatten(gpu) if name in ("driver_version", "cuda_version")},
    }


def _describe_choice(snapshot: VariantSnapshot) -> dict[str, str]:
    """Returns the options that the search chose; without one they follow from the spec."""
    tuning = snapshot.record.tuning
    if tuning is None:
        return {}
    chosen = next((trial for trial in tuning.trials if trial.number == tuning.chosen), None)
    choice = chosen.choice if chosen else {}
    return {f"option {knob}": choice[knob] for knob in sorted(choice)}


def _flatten(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of nested mappings by their dotted names."""
    if isinstance(value, Mapping):
        for key in sorted(map(str, value)):
            yield from _flatten(value[key], f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, str(value)
