"""Bundles as several machines would prepare them, parts and versions, and keys that sign them.

The files need not be models.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ortprep.bundle.conversion_record import LeftOut
from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    ComputeCapabilityRange,
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
    Decision,
    Manifest,
    MeasurementRecord,
    OutputError,
    SourceRecord,
    VariantRecord,
    VerificationRecord,
    write_manifest,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.registry.backend import Kind, ref_name
from ortprep.registry.documents import (
    FILE_TYPE,
    PART_TYPE,
    TITLE,
    PartVariant,
    annotate,
    build_manifest,
    build_version,
    describe_content,
    parse_part,
)
from ortprep.runtime.machine.hardware import Gpu, Hardware

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
ANY = Requirements(VersionRange("1.23"), (CPU,))
HERE = Requirements(VersionRange("1.23"), (CPU,), machine=platform.machine())
ELSEWHERE = Requirements(VersionRange("1.23"), (CPU,), machine="s390x", cpu_features=("vx",))


def on_gpu(major, minor):
    capability = ComputeCapabilityRange((major, minor), (major, minor + 1))
    return Requirements(VersionRange("1.23"), (CUDA, CPU), compute_capability=capability)


@dataclass(frozen=True)
class Made:
    """One variant that a machine prepared.

    Attributes:
        name: Of the variant.
        needs: What it requires.
        weights: Content of its weights.
        init_ms: Median of its init and of when it is ready, None for not measured.
        steady_ms: Median of its steady run.
        error: Largest error of an output, in units of its tolerance.
        golden: Content of its own golden sample, None for the bundle's.
        spread: Half the distance of the quartiles of every time, as a share of its median.
    """

    name: str
    needs: Requirements = ANY
    weights: bytes = b"weights"
    init_ms: float | None = 10.0
    steady_ms: float = 5.0
    error: float = 0.1
    golden: bytes | None = None
    spread: float = 0.0

    @property
    def target(self):
        return "cuda" if CUDA in self.needs.providers else "cpu"


@dataclass(frozen=True)
class Build:
    """What a machine prepared."""

    made: Sequence[Made] = (Made("portable"),)
    name: str = "net"
    source: bytes = b"source"
    source_data: bytes = b"weights"
    spec: bytes = b"spec"
    created_at: str = "2026-11-20T00:00:00+00:00"
    onnxruntime: str = "1.31.1"
    cores: int = 2
    graph: bytes = b"graph"
    extra: dict[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def write_bundle(
    folder: Path, build: Build | None = None, *, portable: bool = True, **changes: object
) -> Path:
    """Writes an intact bundle, with a portable variant unless told otherwise, and returns its folder."""
    build = dataclasses.replace(build or Build(), **changes)
    if portable and all(made.name != "portable" for made in build.made):
        build = dataclasses.replace(build, made=(*build.made, Made("portable")))
    entries = [_write(folder, "golden.npz", b"golden")]
    entries += [_write(folder, path, data) for path, data in build.extra.items()]
    variants = []
    for made in build.made:
        files = (
            _write(folder, f"{made.name}/{build.name}_optimized.onnx", build.graph),
            _write(folder, f"{made.name}/{build.name}_optimized.onnx.data", made.weights),
        )
        entries += files
        variant = _variant(made, files)
        if made.golden is not None:
            entries.append(_write(folder, f"{made.name}/golden.npz", made.golden))
            variant = variant._replace(golden=Golden(entries[-1], Tolerance(1e-2, 1e-3)))
        variants.append(variant)
    config = LoaderConfig(
        schema_version=LOADER_SCHEMA_VERSION,
        name=build.name,
        inputs=(TensorSpec("x", "float32", ("batch", 3)),),
        outputs=(TensorSpec("y", "float32", None),),
        golden=Golden(entries[0], Tolerance(1e-3, 1e-5)),
        variants=tuple(variants),
    )
    write_loader_config(folder, config)
    loader = (folder / "loader.json").read_bytes()
    entries.append(FileEntry("loader.json", len(loader), digest_bytes(loader)))
    write_manifest(folder, _manifest(build, tuple(sorted(entries, key=lambda entry: entry.path))))
    return folder


def _write(folder, path, data):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return FileEntry(path, len(data), digest_bytes(data))


def _variant(made, files):
    return Variant(
        name=made.name,
        target=made.target,
        model=files[0].path,
        files=files,
        session_options=SessionOptionsRecord("ORT_DISABLE_ALL"),
        providers=tuple(ProviderRecord(name) for name in made.needs.providers),
        requirements=made.needs,
    )


def _manifest(build, files):
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name=build.name,
        created_at=build.created_at,
        pipeline_version="0.1.0",
        spec_digest=digest_bytes(build.spec),
        source=_source(build),
        environment={"onnxruntime": build.onnxruntime, "hardware": _hardware(build)},
        variants=tuple(_record(made) for made in build.made),
        files=files,
        left_out=tuple(LeftOut(name, "not accurate enough") for name in build.left_out),
    )


def _hardware(build):
    """Returns the machine that has what the variants require, and nothing else."""
    needs = [made.needs for made in build.made]
    gpus = [one.compute_capability.minimum for one in needs if one.compute_capability]
    return {
        "machine": next((one.machine for one in needs if one.machine), platform.machine()),
        "cpu_features": sorted({flag for one in needs for flag in one.cpu_features}),
        "cores": build.cores,
        "gpus": [{"name": "GPU", "compute_capability": list(capability)} for capability in gpus],
    }


def _source(build):
    contents = {"m.onnx": build.source, "m.onnx.data": build.source_data}
    files = tuple(FileEntry(path, len(data), digest_bytes(data)) for path, data in contents.items())
    return SourceRecord("path", "m.onnx", files[0].sha256, files, {"": 17}, 8, {"Conv": 1}, 1024)


def _record(made):
    error = OutputError("y", "x=[1,3]", 1e-4, 1e-4, (0,), 1.0, 1.0, made.error)
    measurements = ()
    if made.init_ms is not None:
        plans = (
            _figures("default", 100.0, 5.0),
            _figures("prepared", made.init_ms, made.steady_ms, made.spread),
        )
        measurements = (MeasurementRecord("warm", 3, "x=[1,3]", plans),)
    return VariantRecord(
        made.name,
        made.target,
        "all",
        (),
        VerificationRecord(1e-3, 1e-5, 1, "seeded", (error,), ()),
        measurements=measurements,
        decision=Decision("prepared", "sooner") if measurements else None,
    )


def _figures(plan, init_ms, steady_ms, spread=0.0):
    init, steady = summary(init_ms, spread), summary(steady_ms, spread)
    return PlanFigures(plan, init, init, steady, steady, init, init)


def summary(median, spread=0.0):
    low, high = median * (1 - spread), median * (1 + spread)
    return Samples((low, median, high))


def machine_with_gpu(capability):
    """A machine with one GPU of that compute capability."""
    return BARE._replace(gpus=(Gpu("GPU", capability, 80 << 30, "", "13.0", "GPU-0"),))


BARE = Hardware(platform.machine(), "processor", (), 2, 8 << 30)


def read_tree(folder):
    """Returns the content of every file that is part of a bundle."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".registry" not in path.parts
    }


def write_keys(folder, *, password=None):
    """Writes a private and a public key; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


SOURCE, SPEC = digest_bytes(b"source"), digest_bytes(b"spec")
CREATED_AT, PUBLISHED_AT = "2026-01-02T03:04:05+00:00", "2026-01-02T03:05:00+00:00"
CPU_VARIANT = PartVariant("cpu", "cpu", "1.31.1", "", ANY)


def make_part(model, files, *, created_at=CREATED_AT, **changes):
    """Returns a part of files, with other fields than usual where they are given."""
    fields = {"model": model, "source": SOURCE, "spec": SPEC, "created_at": created_at}
    fields |= {"built_on": SOURCE, "machine": "amd64", "variants": (CPU_VARIANT,)} | changes
    layers = [
        {**describe_content(FILE_TYPE, digest_bytes(data), len(data)), "annotations": {TITLE: path}}
        for path, data in files.items()
    ]
    return parse_part(build_manifest(PART_TYPE, layers, annotations=annotate(**fields)))


def name_of(version):
    """Returns the name of a version's ref."""
    return ref_name(version.digest, version.label)


def put_version(catalogue, version):
    """Adds a version without asking whether its label is free."""
    catalogue.backend.put_ref(version.model, Kind.VERSION, name_of(version), version.data)


def write_ref(registry, model, kind, data, rest=""):
    """Writes a document into a folder as somebody with a tool of his own would."""
    path = Path(registry, model, kind, ref_name(digest_bytes(data), rest))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def make_version(part, label="1.0", *, published_at=PUBLISHED_AT):
    """Returns the version of one part."""
    return build_version(part.model, [part], label=label, published_at=published_at)


def put_part(backend, part, folder):
    """Uploads what is missing of a part from a folder, and its document; returns the bytes sent."""
    sent_bytes = 0
    for entry in missing(backend, part):
        backend.put_file(part, entry, folder / entry.path)
        sent_bytes += entry.size_bytes
    backend.put_ref(part.model, Kind.PART, ref_name(part.digest), part.data)
    return sent_bytes


def missing(backend, part):
    """Returns the files of a part that a backend says it does not have, each digest once."""
    entries = {entry.sha256: entry for entry in part.files}.values()
    return tuple(entry for entry in entries if not backend.has_file(part, entry))


def read_part(backend, digest, model):
    """Returns the document of a part."""
    with backend.open_ref(model, Kind.PART, ref_name(digest)) as opened:
        return b"".join(map(bytes, opened.blocks))


def read_file(backend, part, path, offset=0):
    """Returns a file of a part from an offset on."""
    entry = next(entry for entry in part.files if entry.path == path)
    with backend.open_file(part, entry, offset) as opened:
        return b"".join(map(bytes, opened.blocks))[offset - opened.start :]


class Watched:
    """A backend that tells of its calls before and after each: their names and their arguments."""

    def __init__(self, backend, before=lambda *_: None, after=lambda *_: None):
        self._backend, self._before, self._after = backend, before, after

    def __getattr__(self, name):
        value = getattr(self._backend, name)

        def call(*args, **kwargs):
            self._before(name, *args)
            result = value(*args, **kwargs)
            self._after(name, *args)
            return result

        return call if callable(value) else value


def list_versions(backend, model):
    """Returns the digests of a model's versions."""
    return list(backend.list_refs(model, Kind.VERSION).values())


def write_files(folder, contents):
    """Writes files below a folder, and returns it."""
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder
