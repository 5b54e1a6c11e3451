"""`loader.json`: what a runtime job needs to make a session, and nothing more."""

# Without `from __future__ import annotations`: the decoder then has the types as they are and need not
# evaluate them, which is a good part of a job's first load.
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import StrPath, is_digest
from ortprep.bundle.paths import is_safe_name, is_safe_path
from ortprep.bundle.record import read_record, write_record
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import BundleError, IntegrityError
from ortprep.versions import parse_version

LOADER_SCHEMA_VERSION = "1.5"
MAX_LOADER_BYTES = 1024 * 1024
"""Largest `loader.json`, in bytes; a variant takes about 2,000."""

MAX_VARIANTS = 256
"""Largest number of variants in a bundle; a build makes one per target and precision."""

MAX_RANK = 32
"""Most axes of a tensor; numpy 1 has no more."""

_UNUSABLE = ("float8", "float4", "uint4", "int4", "uint2", "int2")
_MAX_PLAIN = 128
_MARKS = str.maketrans(dict.fromkeys("._+-", "x"))

SOURCE_PRECISION = "fp32"
"""Precision of a variant that is not converted: whatever the source has."""

PRECISIONS = (SOURCE_PRECISION, "fp16", "bf16", "int8", "int4")
"""What a variant may be in."""


class FileEntry(NamedTuple):
    """A file of the bundle.

    Attributes:
        path: Relative POSIX path below the bundle's folder.
        size_bytes: Its exact size.
        sha256: Its digest, `sha256:<hex>`.
        blocks: Digest of the digests of its blocks, which a load compares, since several threads can compute
            it at once (`digest_blocks`); "" for a file of one block.
    """

    path: str
    size_bytes: int
    sha256: str
    blocks: str = ""


class TensorSpec(NamedTuple):
    """An input or output of a model.

    Attributes:
        name: Its name in the graph.
        dtype: ONNX element type as numpy spells it (`float32`, `int64`, `bool`, `string`, `bfloat16`, …).
        shape: One item per axis: a fixed size, a symbolic name, or None where the model says nothing;
            None instead of the whole shape where even the rank is unknown.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether an array of a shape may be this tensor: fixed axes may not differ."""
        if self.shape is None:
            return True
        axes = zip(self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(a == size or not isinstance(a, int) for a, size in axes)


class VersionRange(NamedTuple):
    """Versions `minimum <= v < below`, compared by their numeric parts."""

    minimum: str
    below: str | None = None


class ComputeCapabilityRange(NamedTuple):
    """GPU compute capabilities `minimum <= c < below`, each as (major, minor)."""

    minimum: tuple[int, int]
    below: tuple[int, int]


class Requirements(NamedTuple):
    """Properties of a machine on which a variant loads and answers correctly.

    Attributes:
        onnxruntime: ONNX Runtime versions that read the graph.
        providers: Execution providers that must be obtained, in order.
        machine: `platform.machine()` of the machine, None if it does not matter.
        cpu_features: Flags `/proc/cpuinfo` must list.
        cpu_features_absent: Flags it must not list: a graph laid out for blocks of 8 floats is wrong on a
            machine where ONNX Runtime works on blocks of 16.
        compute_capability: GPUs the variant runs on, None for a variant without GPU.
    """

    onnxruntime: VersionRange
    providers: tuple[str, ...]
    machine: str | None = None
    cpu_features: tuple[str, ...] = ()
    cpu_features_absent: tuple[str, ...] = ()
    compute_capability: ComputeCapabilityRange | None = None


class FirstPhase(NamedTuple):
    """Other options for a session of a variant's model: sooner ready, and slower per run.

    Attributes:
        session_options: Options of the session.
        providers: The variant's providers, in the same order on the same device, with other options.
    """

    session_options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]


class Tolerance(NamedTuple):
    """`|got − expected| <= atol + rtol · |expected|`, by element, apart from a few that rounding moved.

    Attributes:
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        noise: Largest difference that a few elements of floats may have beyond that; 0 for none.
        noise_share: Share of elements that these few may be; one may always, if there is `noise`.
    """

    rtol: float
    atol: float
    noise: float = 0.0
    noise_share: float = 0.0


class Golden(NamedTuple):
    """A small input with its outputs.

    The file is an `.npz` whose arrays are named `input:NAME` and `output:NAME`.

    Attributes:
        file: The file.
        default: Tolerance of every output that `outputs` does not name.
        outputs: Tolerances by output name.
    """

    file: FileEntry
    default: Tolerance
    outputs: Mapping[str, Tolerance] = {}


class Variant(NamedTuple):
    """One way to load the model, prepared for one kind of machine.

    Attributes:
        name: Unique in the bundle (`cpu`, `cuda`, `portable`).
        target: Name that a job asks for (`cpu`, `cuda`); several variants may serve one target.
        model: Path of the ONNX file; also listed in `files`.
        files: Every file the session reads.
        session_options: Options of the session.
        providers: In order of preference, as ONNX Runtime takes them.
        requirements: Required properties of the machine.
        first_phase: Session that may serve until one with the options above is made, None for none.
        precision: `fp32` as the source, or what it was converted to: `fp16`, `bf16`, `int8`, `int4`.
        golden: Its own golden sample; None for the bundle's.
        judged: Whether the application that uses the model judged its precision, so that its sessions may be
            of this variant though it asks for none.
    """

    name: str
    target: str
    model: str
    files: tuple[FileEntry, ...]
    session_options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]
    requirements: Requirements
    first_phase: FirstPhase | None = None
    precision: str = SOURCE_PRECISION
    golden: Golden | None = None
    judged: bool = False


class LoaderConfig(NamedTuple):
    """The content of `loader.json`.

    Attributes:
        source: The model that the bundle was prepared from, then the files of its external data, with paths
            relative to the model's folder; empty if that is not recorded.
    """

    schema_version: str
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    golden: Golden
    variants: tuple[Variant, ...]
    source: tuple[FileEntry, ...] = ()


def write_loader_config(folder: StrPath, config: LoaderConfig) -> None:
    """Writes `loader.json` with its own digest.

    Raises:
        BundleError: It is larger than readers accept.
        OSError: The folder is read-only or full.
    """
    from pathlib import Path  # takes a job milliseconds

    write_record(Path(folder, LOADER_FILE), config, max_bytes=MAX_LOADER_BYTES)


def read_loader_config(folder: StrPath, *, sha256: str | None = None) -> LoaderConfig:
    """Reads and checks `loader.json`, whose bytes must have a digest if one is given.

    Raises:
        BundleError: The file is missing, too large, not of this form, of a newer major version, or
            contradicts itself.
        IntegrityError: It was changed, or names a file outside the bundle.
    """
    path = os.path.join(folder, LOADER_FILE)
    config = read_record(
        LoaderConfig, path, supported=LOADER_SCHEMA_VERSION, max_bytes=MAX_LOADER_BYTES, sha256=sha256
    )
    _check(config, name=path)
    return config


def _check(config: LoaderConfig, *, name: str) -> None:
    """Raises for a config that contradicts itself, as `read_loader_config` documents."""
    for safe in (config.name, *(text for v in config.variants for text in (v.name, v.target))):
        if not is_safe_name(safe):
            raise IntegrityError(
                f"bad name in {name}\n  expected letters, digits, '.', '_', '-'; got {safe!r}"
            )
    if not 0 < len(config.variants) <= MAX_VARIANTS:
        got = len(config.variants)
        raise BundleError(f"bad number of variants in {name}\n  expected 1 to {MAX_VARIANTS}, got {got}")
    names = [variant.name for variant in config.variants]
    if len(set(names)) != len(names):
        raise BundleError(f"variant named twice in {name}\n  expected every name once, got {names}")
    for variant in config.variants:
        for problem in _contradictions(variant):
            raise BundleError(f"bad variant {variant.name!r} in {name}\n  {problem}")
    goldens = [config.golden, *(v.golden for v in config.variants if v.golden is not None)]
    for tolerance in (limits for golden in goldens for limits in (golden.default, *golden.outputs.values())):
        values = (tolerance.rtol, tolerance.atol, tolerance.noise, tolerance.noise_share)
        if not all(0 <= value < math.inf for value in values):
            raise BundleError(f"bad tolerance in {name}\n  expected finite numbers >= 0, got {tolerance}")
    unusable = find_unusable((*config.inputs, *config.outputs))
    if unusable:
        raise BundleError(
            f"inputs or outputs of a type that no array has in {name}\n"
            f"  expected bfloat16, or a type of numpy; got {unusable}",
            hint="cast them inside the model, and prepare it again",
        )
    check_file_entries((*listed_files(config), *config.source), name=name)


def find_unusable(tensors: Iterable[TensorSpec]) -> str:
    """Returns the tensors of float8 and of 4 and 2 bits, as `'x': int4`; no array has these types."""
    return ", ".join(
        f"{one.name[:80]!r}: {one.dtype[:80]}" for one in tensors if one.dtype.startswith(_UNUSABLE)
    )


def _contradictions(variant: Variant) -> Iterator[str]:
    """Yields the problems of a variant, each as expected and got."""
    needs = variant.requirements
    if variant.model not in {entry.path for entry in variant.files}:
        yield f"expected its model {variant.model!r} among its files"
    providers = tuple(provider.name for provider in variant.providers)
    if not providers or needs.providers != providers:
        yield f"expected the providers it requires, {list(needs.providers)}, got {list(providers)}"
    first = variant.first_phase
    if first is not None and _places(first.providers) != _places(variant.providers):
        yield f"expected its own providers and devices in its first phase, got {_places(first.providers)}"
    yield from find_faults(needs)


def find_faults(needs: Requirements) -> Iterator[str]:
    """Yields what of requirements is no version or no name: they are compared, and shown as they are."""
    for version in (needs.onnxruntime.minimum, needs.onnxruntime.below):
        if version is not None and (parse_version(version) is None or not _is_plain(version)):
            yield f"expected a version of ONNX Runtime, got {version[:80]!r}"
    for text in (*needs.providers, needs.machine or "any", *needs.cpu_features, *needs.cpu_features_absent):
        if not _is_plain(text):
            yield f"expected a name of letters, digits, '.', '_', '-' and '+', got {text[:80]!r}"


def _is_plain(text: str) -> bool:
    """Returns whether a text can be part of a message: it gets there as it is."""
    return text.isascii() and text.translate(_MARKS).isalnum() and len(text) <= _MAX_PLAIN


def _places(providers: tuple[ProviderRecord, ...]) -> list[tuple[str, str | None]]:
    """Returns where a session runs: what a machine is asked for holds for both of a variant's sessions."""
    return [(provider.name, provider.options.get("device_id")) for provider in providers]


def listed_files(config: LoaderConfig) -> tuple[FileEntry, ...]:
    """Returns every file the loader config names, each once, in order."""
    entries = [entry for variant in config.variants for entry in variant.files]
    goldens = [golden_of(config, variant).file for variant in config.variants]
    return tuple(dict.fromkeys([*entries, *goldens, config.golden.file]))


def golden_of(config: LoaderConfig, variant: Variant) -> Golden:
    """Returns the golden sample that a variant's answers are checked with: its own, or the bundle's."""
    return config.golden if variant.golden is None else variant.golden


def check_file_entries(entries: tuple[FileEntry, ...], *, name: str) -> None:
    """Checks that paths stay inside the bundle and digests are digests.

    Raises:
        IntegrityError: One does not.
    """
    for entry in entries:
        if not is_safe_path(entry.path):
            raise IntegrityError(
                f"path leaves its bundle: {entry.path!r} in {name}\n  expected a path as in a/b.onnx"
            )
        digests = (entry.sha256, entry.blocks) if entry.blocks else (entry.sha256,)
        if not all(map(is_digest, digests)) or entry.size_bytes < 0:
            got = ", ".join(repr(digest[:80]) for digest in digests)
            raise IntegrityError(
                f"bad digest or size for {entry.path!r} in {name}\n"
                f"  expected sha256: and 64 digits, got {got}, {entry.size_bytes} bytes"
            )


def find_variant(config: LoaderConfig, name: str) -> Variant | None:
    """Returns the variant of that name, if there is one."""
    return next((variant for variant in config.variants if variant.name == name), None)
