"""One bundle from parts that were prepared on several machines. Pure.

Whatever is not as a machine published it (names of folders, `loader.json`, `manifest.json`) is a function
of the parts and of the choice of variants, so that whoever has the parts can compute it again and compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.bundle.conversion_record import LeftOut
from pipeline.bundle.digest import PREFIX, digest_bytes
from pipeline.bundle.loader_config import LOADER_FILE, FileEntry, LoaderConfig, Variant
from pipeline.bundle.manifest import MANIFEST_FILE, Manifest, PartOrigin, VariantRecord
from pipeline.bundle.record import format_record
from pipeline.errors import IntegrityError
from pipeline.registry.description import describe_variant
from pipeline.registry.records import PartRecord
from pipeline.runtime.loading.variant_selection import needs_gpu

PORTABLE = "portable"


@dataclass(frozen=True)
class Part:
    """A part with its two records, read and checked against its digests.

    Attributes:
        digest: Of the part's record.
        record: What was published.
        config: Its `loader.json`.
        manifest: Its `manifest.json`.
    """

    digest: str
    record: PartRecord
    config: LoaderConfig
    manifest: Manifest


@dataclass(frozen=True)
class Candidate:
    """A variant of a version.

    Attributes:
        part: What it is from.
        variant: As its part has it.
        name: What it is called in the bundle.
    """

    part: Part
    variant: Variant
    name: str


Placement = tuple[str, Part, FileEntry]
"""A file's path in the bundle, the part that has it, and its entry there."""


@dataclass(frozen=True)
class Composition:
    """A bundle that is to be written.

    Attributes:
        candidates: Its variants, in order of preference.
        files: What to fetch.
        written: Content of the files that no part has, by path.
    """

    candidates: tuple[Candidate, ...]
    files: tuple[Placement, ...]
    written: Mapping[str, bytes]


def list_candidates(parts: Sequence[Part]) -> tuple[Candidate, ...]:
    """Returns every variant of a version under its name there, in order of preference.

    First what runs on a GPU, last what runs anywhere; among equals, what was prepared last. Of variants for
    the same target, hardware and ONNX Runtime only the one prepared last is there. Where two have the same
    name, part of a digest is added to that of the second.

    Raises:
        IntegrityError: The parts are not of one model with one interface.
    """
    _check_alike(parts)
    newest_first = sorted(parts, key=lambda part: (part.record.created_at, part.digest), reverse=True)
    seen: set[object] = set()
    found: list[tuple[Part, Variant]] = []
    for part in newest_first:
        # Described anew: what the part's record says of them is not signed.
        described = [describe_variant(variant, part.manifest.environment) for variant in part.config.variants]
        fresh = zip(part.config.variants, described, strict=True)
        found += [(part, variant) for variant, what in fresh if what not in seen]
        seen.update(described)
    # Sorting is stable: within a bundle its own order of preference stays.
    found.sort(key=lambda pair: _rank(pair[1]))
    return tuple(_name_apart(found))


def _rank(variant: Variant) -> int:
    if variant.bucket:
        return 3
    if needs_gpu(variant.requirements):
        return 0
    return 2 if variant.name == PORTABLE else 1


def _name_apart(found: Sequence[tuple[Part, Variant]]) -> Iterator[Candidate]:
    taken: set[str] = set()
    for part, variant in found:
        name = variant.name
        digits = 8
        while name in taken:
            name = f"{variant.name}-{part.digest.removeprefix(PREFIX)[:digits]}"
            digits += 1
        taken.add(name)
        yield Candidate(part, variant, name)


def _check_alike(parts: Sequence[Part]) -> None:
    first = parts[0]
    for part in parts:
        same = (part.config.name, part.config.inputs, part.config.outputs) == (
            first.config.name,
            first.config.inputs,
            first.config.outputs,
        )
        if not same or part.manifest.name != first.record.model or part.config.name != first.record.model:
            raise IntegrityError(
                f"parts of different models: {first.digest} and {part.digest}\n"
                f"  expected {first.record.model} with the same inputs and outputs in both",
                hint="publish the model again from each machine",
            )


def compose(candidates: Sequence[Candidate]) -> Composition:
    """Returns the bundle with these variants, in this order.

    All variants of one part alone make that part's own bundle, byte for byte.

    Args:
        candidates: Some of what `list_candidates` returned, at least one.
    """
    parts = list({candidate.part.digest: candidate.part for candidate in candidates}.values())
    names = [candidate.name for candidate in candidates]
    if len(parts) == 1 and set(names) == {variant.name for variant in parts[0].config.variants}:
        whole = parts[0]
        files = tuple((entry.path, whole, entry) for entry in whole.record.files)
        return Composition(tuple(candidates), files, {})
    golden = candidates[0].part
    files = (
        *_placed(candidates),
        (golden.config.golden.file.path, golden, golden.config.golden.file),
    )
    config = dataclasses.replace(
        golden.config, variants=tuple(_place_variant(candidate) for candidate in candidates)
    )
    loader = format_record(config)
    entries = [FileEntry(path, entry.size_bytes, entry.sha256) for path, _, entry in files]
    entries.append(FileEntry(LOADER_FILE, len(loader), digest_bytes(loader)))
    manifest = format_record(_merge_manifests(candidates, parts, entries))
    return Composition(tuple(candidates), files, {LOADER_FILE: loader, MANIFEST_FILE: manifest})


def _placed(candidates: Sequence[Candidate]) -> Iterator[Placement]:
    for candidate in candidates:
        golden = candidate.variant.golden
        for entry in (*candidate.variant.files, *(() if golden is None else (golden.file,))):
            yield _place(candidate, entry.path), candidate.part, entry


def _place(candidate: Candidate, path: str) -> str:
    """Returns where a variant's file lies: each variant has a folder of its own."""
    inside = path.removeprefix(f"{candidate.variant.name}/")
    return f"{candidate.name}/{inside}"


def _place_variant(candidate: Candidate) -> Variant:
    variant, golden = candidate.variant, candidate.variant.golden
    if golden is not None:
        file = dataclasses.replace(golden.file, path=_place(candidate, golden.file.path))
        golden = dataclasses.replace(golden, file=file)
    first = variant.first_phase
    if first is not None and first.model is not None:
        first = dataclasses.replace(first, model=_place(candidate, first.model))
    return dataclasses.replace(
        variant,
        golden=golden,
        first_phase=first,
        name=candidate.name,
        model=_place(candidate, variant.model),
        files=tuple(
            dataclasses.replace(entry, path=_place(candidate, entry.path)) for entry in variant.files
        ),
    )


def _merge_manifests(
    candidates: Sequence[Candidate], parts: Sequence[Part], entries: Sequence[FileEntry]
) -> Manifest:
    base = max(parts, key=lambda part: (part.record.created_at, part.digest)).manifest
    return dataclasses.replace(
        base,
        variants=tuple(record for candidate in candidates for record in _records_of(candidate)),
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
        missing_targets=(),
        left_out=_merge_left_out(candidates, parts),
        parts=tuple(_origin(part, candidates) for part in parts),
    )


def _merge_left_out(candidates: Sequence[Candidate], parts: Sequence[Part]) -> tuple[LeftOut, ...]:
    """Returns what no part has: a variant that one left out may be another's."""
    there = {candidate.variant.name for candidate in candidates}
    missing = {one.variant: one for part in parts for one in part.manifest.left_out}
    return tuple(one for name, one in missing.items() if name not in there)


def _records_of(candidate: Candidate) -> Iterator[VariantRecord]:
    for record in candidate.part.manifest.variants:
        if record.name == candidate.variant.name:
            yield dataclasses.replace(record, name=candidate.name)


def _origin(part: Part, candidates: Sequence[Candidate]) -> PartOrigin:
    return PartOrigin(
        digest=part.digest,
        variants=tuple(candidate.name for candidate in candidates if candidate.part.digest == part.digest),
        created_at=part.manifest.created_at,
        pipeline_version=part.manifest.pipeline_version,
        environment=part.manifest.environment,
        git=part.manifest.git,
    )
