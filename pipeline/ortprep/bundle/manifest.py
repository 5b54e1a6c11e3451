"""`manifest.json`: the record of how a bundle was made and what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import MAX_JSON_BYTES
from ortprep.bundle.conversion_record import ConversionRecord, LeftOut, OutputAccuracy
from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.loader_config import MAX_VARIANTS, FileEntry, check_file_entries
from ortprep.bundle.record import read_record, write_record
from ortprep.errors import BundleError, IntegrityError

MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA_VERSION = "1.4"
MAX_MANIFEST_BYTES = MAX_JSON_BYTES


@dataclass(frozen=True)
class SourceRecord:
    """Origin of the model.

    Attributes:
        kind: `path` or `url`.
        location: The path, URL (credentials removed; on the Hugging Face Hub at its commit).
        sha256: Digest of the model file as fetched.
        files: The model file and its external data, relative to the folder they were fetched into; where
            `source.drop_zip_map` changed the model, its file afterwards.
        opsets: Opset version by domain ("" is ai.onnx).
        ir_version: ONNX IR version of the model file.
        operators: Number of nodes by operator type, subgraphs included.
        initializer_bytes: Size of all weights.
    """

    kind: str
    location: str
    sha256: str
    files: tuple[FileEntry, ...]
    opsets: Mapping[str, int]
    ir_version: int
    operators: Mapping[str, int]
    initializer_bytes: int


@dataclass(frozen=True)
class LadderAttempt:
    """One step of the optimisation ladder that was tried.

    Attributes:
        step: `all`, `extended`, `basic`, `basic-only` or `source`.
        outcome: `taken`, or why the ladder went on.
    """

    step: str
    outcome: str


@dataclass(frozen=True)
class OutputError:
    """Error of one output of one sample against its reference.

    Attributes:
        output: Name of the output.
        shapes: Input shapes of the sample, as `name=[…]` joined by spaces.
        max_abs: Largest absolute difference.
        max_rel: Largest difference relative to the reference's magnitude.
        worst_index: Index of the element furthest outside its tolerance, or nearest to it.
        worst_expected: The reference there.
        worst_got: The candidate there.
        ratio: The element's difference divided by its tolerance, or, outside of it, by how far rounding may
            move it; above 1 is a failure.
        largest: Largest magnitude of a reference of floats; 0 for other types.
        share: Largest share of a sample's elements that are outside the tolerance.
    """

    output: str
    shapes: str
    max_abs: float
    max_rel: float
    worst_index: tuple[int, ...]
    worst_expected: float
    worst_got: float
    ratio: float
    largest: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class VerificationRecord:
    """Candidate against the source under `ORT_DISABLE_ALL` on CPU.

    Attributes:
        rtol: Relative tolerance of outputs that have none of their own.
        atol: Absolute tolerance of outputs that have none of their own.
        samples: Number of inputs compared.
        inputs: `samples` (the spec's files) or `seeded`.
        errors: Per output, the worst of all samples.
        noise_floor: The same for the source with full optimisation, which tells what tolerance is honest.
    """

    rtol: float
    atol: float
    samples: int
    inputs: str
    errors: tuple[OutputError, ...]
    noise_floor: tuple[OutputError, ...]


@dataclass(frozen=True)
class MeasurementRecord:
    """Plans compared in interleaved rounds, one fresh process per figure.

    Attributes:
        cache: `warm` or `cold` (the files were dropped from the page cache before each load); `forked` of
            plans that were compared as forked workers.
        rounds: Processes per plan.
        shapes: Input shapes measured, as `name=[…]` joined by spaces.
        plans: Figures of the plans that answered in every round; their order within a round changes. Those of
            `forked`, a fork of a process that loaded what ships, come after all rounds of the others.
    """

    cache: str
    rounds: int
    shapes: str
    plans: tuple[PlanFigures, ...]


@dataclass(frozen=True)
class Decision:
    """The choice of the plan that a target ships.

    Attributes:
        shipped: Name of the plan.
        reason: One sentence with the figures.
    """

    shipped: str
    reason: str


@dataclass(frozen=True)
class TrialRecord:
    """One plan that was tried.

    Attributes:
        number: In the order they were tried.
        choice: Value by knob; `plan: default` for default ONNX Runtime.
        figures: Measured costs, None if it failed.
        failure: Reason for missing figures, None if there are figures.
        violations: Limits the figures exceed.
        final: Figures of the last comparison, for the plans that took part in it.
    """

    number: int
    choice: Mapping[str, str]
    figures: PlanFigures | None
    failure: str | None = None
    violations: tuple[str, ...] = ()
    final: PlanFigures | None = None


@dataclass(frozen=True)
class TuningRecord:
    """A search for a plan.

    Attributes:
        runs_per_load: Runs of a session before it is gone: what the costs are of.
        knobs: Searched values by knob, the base plan's first.
        trials: Every plan that was tried.
        chosen: Number of the plan that was prepared.
        reason: One sentence with the figures.
        elapsed_s: Duration of the search, in seconds.
        first_phase: Number of the plan that may serve until the chosen one is ready, None for none.
        overlap_mb: Private memory of both sessions together once both are ready, in MB of 2**20 bytes;
            interpreter and libraries count twice.
    """

    runs_per_load: int
    knobs: Mapping[str, tuple[str, ...]]
    trials: tuple[TrialRecord, ...]
    chosen: int
    reason: str
    elapsed_s: float
    first_phase: int | None = None
    overlap_mb: float = 0.0


@dataclass(frozen=True)
class VariantRecord:
    """The record of one variant.

    Attributes:
        name: Name of the variant.
        target: Target it was prepared for.
        level: Ladder step its graph was written at.
        ladder: Every step tried.
        verification: Its answers against the source's.
        measurements: Its measured costs.
        decision: Choice of the plan that ships.
        tuning: The search for its plan, None without one.
        conversion: Conversion of its graph, None if it was not converted.
        accuracy: Accuracy of a converted variant's optimised graph against the source, per output.
    """

    name: str
    target: str
    level: str
    ladder: tuple[LadderAttempt, ...]
    verification: VerificationRecord
    measurements: tuple[MeasurementRecord, ...] = ()
    decision: Decision | None = None
    tuning: TuningRecord | None = None
    conversion: ConversionRecord | None = None
    accuracy: tuple[OutputAccuracy, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        schema_version: Version of this format, "MAJOR.MINOR".
        name: Name of the model.
        created_at: ISO 8601, UTC.
        pipeline_version: Version of ortprep.
        spec_digest: Digest of the resolved spec's canonical JSON.
        source: Origin of the model.
        environment: Versions and hardware the bundle was made with.
        variants: One record per variant of `loader.json`, in the same order.
        files: Every file of the bundle except this one.
        left_out: Variants of the spec that no precision was good enough for, or that were not needed.
    """

    schema_version: str
    name: str
    created_at: str
    pipeline_version: str
    spec_digest: str
    source: SourceRecord
    environment: Mapping[str, Any]
    variants: tuple[VariantRecord, ...]
    files: tuple[FileEntry, ...]
    left_out: tuple[LeftOut, ...] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` with its own digest.

    Raises:
        BundleError: It is larger than readers accept.
        OSError: The folder is read-only or full.
    """
    write_record(folder / MANIFEST_FILE, manifest, max_bytes=MAX_MANIFEST_BYTES)


def read_manifest(folder: Path, *, sha256: str | None = None) -> Manifest:
    """Reads and checks a bundle's `manifest.json`; as `read_manifest_file`."""
    return read_manifest_file(folder / MANIFEST_FILE, sha256=sha256)


def read_manifest_file(path: Path, *, sha256: str | None = None) -> Manifest:
    """Reads and checks a manifest, under any name; its bytes must have a digest if one is given.

    Raises:
        BundleError: The file is missing, too large, not of this form, or of a newer major version, or has too
            many variants, or records that no build writes.
        IntegrityError: It was changed, or names a file outside the bundle.
    """
    manifest = read_record(
        Manifest, path, supported=MANIFEST_SCHEMA_VERSION, max_bytes=MAX_MANIFEST_BYTES, sha256=sha256
    )
    check_file_entries(manifest.files, name=str(path))
    if len({entry.path for entry in manifest.files}) != len(manifest.files):  # each is read and hashed
        raise IntegrityError(f"a file is listed twice in {path}\n  expected each of its files once")
    if len(manifest.variants) > MAX_VARIANTS:
        got = len(manifest.variants)
        raise BundleError(f"too many variants in {path}\n  expected at most {MAX_VARIANTS}, got {got}")
    for fault in _find_faults(manifest):
        raise BundleError(f"not a manifest: {path}\n  {fault}")
    return manifest


def _find_faults(manifest: Manifest) -> Iterator[str]:
    """Yields what of the records no build writes, and nothing that shows them could make sense of."""
    for tuning in (variant.tuning for variant in manifest.variants if variant.tuning):
        if len({trial.number for trial in tuning.trials}) != len(tuning.trials):
            yield "expected each number of a trial once"
        if not all(tuning.knobs.values()):
            yield "expected values of every knob, got none"
        if not math.isfinite(tuning.elapsed_s):
            yield f"expected the seconds of a search, got {tuning.elapsed_s}"
    made = (variant.conversion for variant in manifest.variants)
    for conversion in (*made, *(left_out.conversion for left_out in manifest.left_out)):
        if conversion and not all(step.outcome for step in conversion.steps):
            yield "expected the outcome of every step of a conversion, got none"


def sum_folders(manifest: Manifest) -> Counter[str]:
    """Returns the sizes in bytes of the folders of a bundle, by name; a variant's files are in its own."""
    sizes: Counter[str] = Counter()
    for entry in manifest.files:
        sizes[entry.path.partition("/")[0]] += entry.size_bytes
    return sizes
