"""Bundles as parts of a registry, and the part with the best variant that a machine can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.digest import DigestCache, digest_bytes, digest_json
from ortprep.bundle.environment import list_facts, pin_onnxruntime
from ortprep.bundle.loader_config import (
    MAX_LOADER_BYTES,
    FileEntry,
    LoaderConfig,
    Variant,
    listed_files,
    read_loader_config,
)
from ortprep.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, read_manifest
from ortprep.bundle.paths import open_inside
from ortprep.bundle.verification import check_bundle
from ortprep.errors import BundleError, IntegrityError, NotPublishedError, RegistryError
from ortprep.quoting import quoted
from ortprep.registry.documents import (
    FILE_TYPE,
    PART_TYPE,
    TITLE,
    Part,
    PartVariant,
    annotate,
    build_manifest,
    describe_content,
    parse_part,
)
from ortprep.registry.references import VersionRef
from ortprep.runtime.loading.variant_selection import Machine, find_lacks, needs_gpu
from ortprep.runtime.machine.hardware import KERNEL_FEATURES, Hardware

PORTABLE = "portable"
"""The variant that `prepare` makes for all other machines."""

_MAX_REASON = 2000
"""Largest number of characters that a message has of one part."""

_GPU_FACT = re.compile(r"hardware\.gpus\.[0-9]+\.(name|compute_capability)")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def read_part(bundle: Path) -> Part:
    """Checks every byte of a bundle, and returns it as a part.

    Raises:
        BundleError: The bundle cannot be read, or has no variant that runs anywhere.
        IntegrityError: It is not as it was written.
    """
    cache = DigestCache()
    check_bundle(bundle, cache.digest)
    # `prepare` may replace the bundle meanwhile: the records must be what the part lists as its files.
    with open_inside(bundle, MANIFEST_FILE) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    itself = FileEntry(MANIFEST_FILE, len(data), digest_bytes(data))
    manifest = read_manifest(bundle, sha256=itself.sha256)
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    config = read_loader_config(bundle, sha256=listed.get(LOADER_FILE, ""))
    part = build_part(manifest, config, (*manifest.files, itself))
    if not any(one.hardware == "" and not needs_gpu(one.requirements) for one in part.summary.variants):
        raise BundleError(
            f"not a complete bundle: {bundle}\n  expected a variant that runs on any machine, got none",
            hint=f"ortprep prepare {quoted(manifest.name)}",
        )
    return part


def check_part_bundle(part: Part, config: LoaderConfig, manifest: Manifest) -> None:
    """Raises IntegrityError if the two records of a pulled part contradict its document."""
    expected = build_part(manifest, config, (*manifest.files, small_files(part)[MANIFEST_FILE]))
    names = ("model", "source", "spec", "summary.variants", "summary.created_at", "summary.built_on")
    others = [name for name in names if attrgetter(name)(expected) != attrgetter(name)(part)]
    if set(expected.files) != set(part.files):
        others.append("files")
    if config.name != manifest.name or not set(listed_files(config)) <= set(part.files):
        others.append("what loader.json lists")
    if others:
        raise IntegrityError(
            f"a part contradicts its document: {part.model} ({part.digest})\n"
            f"  expected what is in its manifest.json and loader.json, got other {', '.join(others)}"
        )


def small_files(part: Part) -> dict[str, FileEntry]:
    """Returns `loader.json` and `manifest.json` of a part; raises IntegrityError unless they are small."""
    entries = {entry.path: entry for entry in part.files}
    limits = {LOADER_FILE: MAX_LOADER_BYTES, MANIFEST_FILE: MAX_MANIFEST_BYTES}
    for path, max_bytes in limits.items():
        if path not in entries or entries[path].size_bytes > max_bytes:
            got = f"{entries[path].size_bytes} bytes" if path in entries else "none"
            raise IntegrityError(
                f"bad {path} in a part: {part.model}\n  expected at most {max_bytes} bytes, got {got}"
            )
    return {path: entries[path] for path in limits}


def build_part(manifest: Manifest, config: LoaderConfig, files: Iterable[FileEntry]) -> Part:
    """Returns the part that a bundle is."""
    facts = list_facts(manifest.environment)
    machine = facts.get("hardware.machine", "")
    annotations = annotate(
        model=manifest.name,
        # The weights too: models that were trained again may differ in nothing else.
        source=digest_json([[entry.path, entry.sha256] for entry in manifest.source.files]),
        spec=manifest.spec_digest,
        created_at=manifest.created_at,
        built_on=_identify_machine(manifest),
        machine=_MACHINES.get(machine, machine),
        variants=tuple(_describe_variant(variant, facts) for variant in config.variants),
    )
    layers = [
        {**describe_content(FILE_TYPE, entry.sha256, entry.size_bytes), "annotations": {TITLE: entry.path}}
        for entry in sorted(files, key=lambda entry: entry.path)
    ]
    return parse_part(build_manifest(PART_TYPE, layers, annotations=annotations))


def _identify_machine(manifest: Manifest) -> str:
    """Returns a digest of what jobs can tell apart of the hardware of a build, and of its ONNX Runtime.

    That are not cores and the name of the processor: of two parts that differ in these alone, every job takes
    the newer one.
    """
    facts = list_facts(manifest.environment)
    flags = facts.get("hardware.cpu_features", "").split()
    features = [flag for flag in flags if flag in KERNEL_FEATURES]
    gpus = sorted({text for name, text in facts.items() if _GPU_FACT.fullmatch(name)})
    return digest_json(
        [
            pin_onnxruntime(manifest.environment),
            facts.get("hardware.machine", ""),
            features,
            gpus,
        ]
    )


def _describe_variant(variant: Variant, facts: Mapping[str, str]) -> PartVariant:
    """Returns the record of a variant in listings; equal ones serve the same machines."""
    needs = variant.requirements
    return PartVariant(
        name=variant.name,
        target=variant.target,
        onnxruntime=facts.get("onnxruntime", needs.onnxruntime.minimum),
        gpu="" if needs.compute_capability is None else facts.get("hardware.gpus.0.name", ""),
        requirements=needs,
    )


def choose_part(
    parts: Sequence[Part],
    reference: VersionRef,
    hardware: Hardware,
    *,
    onnxruntime: str | None,
    digest: str | None = None,
) -> Part:
    """Returns the best part for a machine.

    It has a variant for the GPU, else one for the processor, else the portable one, which every part has.
    Among equals it is the one prepared last.

    Args:
        parts: Candidates.
        reference: Name of the parts in messages.
        hardware: Processor and GPUs of the machine.
        onnxruntime: Its installed version of ONNX Runtime, None to check none.
        digest: A part for another machine.

    Raises:
        NotPublishedError: The named part is not there.
        RegistryError: None fits this machine; every part is named with the reason.
    """
    if digest is not None:
        named = next((part for part in parts if part.digest == digest), None)
        if named is None:
            digests = ", ".join(part.digest for part in parts)
            raise NotPublishedError(f"no such part of {reference}: {digest}\n  expected one of {digests}")
        return named
    fitting: list[tuple[int, Part]] = []
    lines = []
    for part in sorted(parts, key=lambda part: (part.summary.created_at, part.digest), reverse=True):
        variants = part.summary.variants
        reasons = [(variant, _reasons(variant, hardware, onnxruntime)) for variant in variants]
        ranks = [_rank(variant) for variant, lacks in reasons if not lacks]
        if ranks:
            fitting.append((min(ranks), part))
        why = "; ".join(f"{variant.name}: {', '.join(lacks)}" for variant, lacks in reasons)
        lines.append(f"  {part.digest}: {why[:_MAX_REASON]}")
    if not fitting:
        raise RegistryError(
            "\n".join((f"no part of {reference} fits this machine", *lines)),
            hint=f"ortprep pull {quoted(reference)} --part DIGEST --out DIR   (for another machine)",
        )
    return min(fitting, key=lambda ranked: ranked[0])[1]


def _rank(variant: PartVariant) -> int:
    if needs_gpu(variant.requirements):
        return 0
    return 2 if variant.name == PORTABLE else 1


def _reasons(variant: PartVariant, hardware: Hardware, onnxruntime: str | None) -> tuple[str, ...]:
    """Returns what this machine lacks for a variant; on a machine with several GPUs, for the best of them."""
    machine, devices = Machine(hardware, onnxruntime), range(max(1, len(hardware.gpus)))
    return min((find_lacks(variant.requirements, machine, device) for device in devices), key=len)
