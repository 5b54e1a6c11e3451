"""Bundles for tests of the format: the files need not be models."""

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    write_loader_config,
)
from ortprep.bundle.manifest import (
    MANIFEST_SCHEMA_VERSION,
    Manifest,
    SourceRecord,
    VariantRecord,
    VerificationRecord,
    write_manifest,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord

CONTENT = {
    "golden.npz": b"golden",
    "portable/m_optimized.onnx": b"graph",
    "portable/m_optimized.onnx.data": bytes(range(256)) * 4,
}


def write_bundle(folder):
    """Writes an intact bundle with one portable variant."""
    entries = {}
    for path, data in CONTENT.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        entries[path] = FileEntry(path, len(data), digest_bytes(data))
    write_loader_config(folder, loader_config(entries))
    loader = (folder / "loader.json").read_bytes()
    files = (*entries.values(), FileEntry("loader.json", len(loader), digest_bytes(loader)))
    write_manifest(folder, manifest(files))
    return folder


def loader_config(entries):
    return LoaderConfig(
        schema_version=LOADER_SCHEMA_VERSION,
        name="m",
        inputs=(TensorSpec("x", "float32", ("batch", 3)),),
        outputs=(TensorSpec("y", "float32", None),),
        golden=Golden(entries["golden.npz"], Tolerance(1e-3, 1e-5)),
        variants=(
            Variant(
                name="portable",
                target="cpu",
                model="portable/m_optimized.onnx",
                files=(entries["portable/m_optimized.onnx"], entries["portable/m_optimized.onnx.data"]),
                session_options=SessionOptionsRecord("ORT_DISABLE_ALL"),
                providers=(ProviderRecord("CPUExecutionProvider"),),
                requirements=Requirements(VersionRange("1.23"), ("CPUExecutionProvider",)),
            ),
        ),
    )


def manifest(files):
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name="m",
        created_at="2026-11-20T00:00:00+00:00",
        pipeline_version="0.1.0",
        spec_digest=digest_bytes(b"spec"),
        source=SourceRecord("path", "m.onnx", digest_bytes(b"m"), (), {"": 17}, 8, {"Conv": 1}, 1024),
        environment={},
        variants=(
            VariantRecord(
                "portable", "cpu", "basic", (), VerificationRecord(1e-3, 1e-5, 1, "seeded", (), ())
            ),
        ),
        files=files,
    )
