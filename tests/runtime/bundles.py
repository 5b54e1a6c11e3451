"""Bundles of a tiny linear model, as the build writes them, for tests that load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import (
    FileEntry,
    FirstPhase,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    read_loader_config,
    write_loader_config,
)
from pipeline.bundle.manifest import Manifest, SourceRecord, write_manifest
from pipeline.bundle.session_record import ProviderRecord, SessionOptionsRecord
from pipeline.runtime.tensors import write_tensors
from tests.runtime.tiny_models import write_linear

ROWS, COLUMNS = 8, 4
ANY_VERSION = VersionRange("1.23")
CPU_ONLY = Requirements(ANY_VERSION, ("CPUExecutionProvider",))
CUDA_NEEDED = Requirements(ANY_VERSION, ("CUDAExecutionProvider", "CPUExecutionProvider"))
UNMET = Requirements(VersionRange("99.0"), ("CPUExecutionProvider",))


def weights_of(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def sample() -> NDArray[np.float32]:
    return np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(2, ROWS)


def write_bundle(
    folder: Path,
    *,
    seed: int = 0,
    requirements: Mapping[str, Requirements] | None = None,
    options: SessionOptionsRecord | None = None,
    first: SessionOptionsRecord | None = None,
) -> Path:
    """Writes a bundle with one variant per entry of `requirements`, in that order; returns its folder.

    A variant named `cuda…` is for CUDA, every other one for the CPU. With `first`, each has a first phase.
    """
    variants = tuple(
        _write_variant(folder, name, needs, options or SessionOptionsRecord("ORT_DISABLE_ALL"), seed)
        for name, needs in (requirements or {"cpu": CPU_ONLY}).items()
    )
    if first is not None:
        variants = tuple(
            dataclasses.replace(variant, first_phase=FirstPhase(first, variant.providers))
            for variant in variants
        )
    golden = {"input:x": sample(), "output:y": sample() @ weights_of(seed)}
    write_tensors(folder / "golden.npz", golden)
    config = LoaderConfig(
        schema_version="1.0",
        name="linear",
        inputs=(TensorSpec("x", "float32", ("batch", ROWS)),),
        outputs=(TensorSpec("y", "float32", ("batch", COLUMNS)),),
        golden=Golden(entry(folder, "golden.npz"), Tolerance(1e-4, 1e-5)),
        variants=variants,
    )
    write_loader_config(folder, config)
    write_record(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Part:
    """A variant that answers with weights of its own, so that answers tell which one it was."""

    name: str
    seed: int
    batch: int | None = None
    precision: str = "fp32"
    requirements: Requirements = CPU_ONLY
    io_binding: bool = False


BUCKETED = (
    Part("cpu", seed=0),
    Part("cpu-int8", seed=1, precision="int8"),
    Part("cpu-batch4", seed=2, batch=4),
    Part("cpu-batch8", seed=3, batch=8),
    Part("cpu-int8-batch4", seed=4, batch=4, precision="int8"),
)


def write_converted(folder: Path, parts: Sequence[Part] = BUCKETED) -> Path:
    """Writes a bundle of two precisions with buckets, each variant with a golden sample of its own."""
    write_bundle(folder, requirements={part.name: part.requirements for part in parts})
    config = read_loader_config(folder)
    variants = tuple(
        _convert(folder, variant, part) for variant, part in zip(config.variants, parts, strict=True)
    )
    write_loader_config(folder, dataclasses.replace(config, variants=variants))
    write_record(folder)
    return folder


def _convert(folder: Path, variant: Variant, part: Part) -> Variant:
    weights, x = weights_of(part.seed), batch_of(part.batch or 2)
    paths = write_linear(folder / variant.model, weights, part.batch or "batch")
    golden = f"{part.name}/golden.npz"
    write_tensors(folder / golden, {"input:x": x, "output:y": x @ weights})
    return dataclasses.replace(
        variant,
        files=tuple(entry(folder, f"{part.name}/{path.name}") for path in paths),
        precision=part.precision,
        binding={"batch": part.batch} if part.batch else {},
        bucket=part.batch is not None,
        golden=Golden(entry(folder, golden), Tolerance(1e-4, 1e-5)),
        io_binding=part.io_binding,
    )


def batch_of(size: int) -> NDArray[np.float32]:
    return np.random.default_rng(size).standard_normal((size, ROWS)).astype(np.float32)


def _write_variant(
    folder: Path, name: str, needs: Requirements, options: SessionOptionsRecord, seed: int
) -> Variant:
    paths = write_linear(folder / name / "linear_optimized.onnx", weights_of(seed))
    providers = tuple(ProviderRecord(provider) for provider in needs.providers)
    return Variant(
        name=name,
        target="cuda" if name.startswith("cuda") else "cpu",
        model=f"{name}/linear_optimized.onnx",
        files=tuple(entry(folder, f"{name}/{path.name}") for path in paths),
        session_options=options,
        providers=providers,
        requirements=needs,
    )


def entry(folder: Path, path: str) -> FileEntry:
    file = folder / path
    return FileEntry(path, file.stat().st_size, digest_file(file))


def write_record(folder: Path) -> None:
    """Writes a manifest that lists what is in the folder now."""
    files = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    source = SourceRecord("demo", "linear", "sha256:" + "0" * 64, (), {"": 17}, 8, {"MatMul": 1}, 128)
    manifest = Manifest(
        schema_version="1.0",
        name="linear",
        created_at="2026-01-01T00:00:00Z",
        pipeline_version="0.1.0",
        spec_digest="sha256:" + "0" * 64,
        source=source,
        environment={},
        variants=(),
        files=tuple(entry(folder, path) for path in files),
    )
    write_manifest(folder, manifest)


def rewrite_digests(folder: Path) -> None:
    """Makes the records agree with the files: a bundle altered by someone who knows the format."""
    config = read_loader_config(folder)
    variants = tuple(
        dataclasses.replace(variant, files=tuple(entry(folder, file.path) for file in variant.files))
        for variant in config.variants
    )
    golden = dataclasses.replace(config.golden, file=entry(folder, config.golden.file.path))
    write_loader_config(folder, dataclasses.replace(config, variants=variants, golden=golden))
    write_record(folder)
