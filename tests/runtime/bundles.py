"""Bundles of a tiny linear model, as the build writes them, for tests that load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import (
    FileEntry,
    FirstPhase,
    Golden,
    LoaderConfig,
    ProviderRecord,
    Requirements,
    SessionOptionsRecord,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    read_loader_config,
    write_loader_config,
)
from pipeline.bundle.manifest import Manifest, SourceRecord, write_manifest
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
