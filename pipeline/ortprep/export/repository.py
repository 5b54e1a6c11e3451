"""NVIDIA Triton's model repository: a folder per model, each written whole or not at all.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what does not run everywhere is not exported unless it is named.

What its ONNX Runtime backend takes is read from its source: triton-inference-server/onnxruntime_backend at
00fd3e8, after release 26.06, `src/onnxruntime.cc`. The model configuration is Triton's own protobuf message.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ortprep
from ortprep.bundle.atomic import new_folder, write_json_atomic
from ortprep.bundle.codec import decode, encode, read_json
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import (
    FileEntry,
    LoaderConfig,
    Requirements,
    Variant,
    VersionRange,
    find_variant,
    golden_of,
)
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import BundleError, ExportError
from ortprep.export.model_config import build_config, correct_ranks, format_config, import_messages
from ortprep.export.options import plan_options
from ortprep.export.placement import SourceBundle, place_files, read_source, try_model
from ortprep.runtime.loading.golden import read_golden
from ortprep.runtime.loading.variant_selection import needs_gpu

EXPORT_FILE = "ortprep-export.json"
CONFIG_FILE = "config.pbtxt"
EXPORT_SCHEMA_VERSION = "1.0"
_VERSION = "1"
_ORT_FORMAT = ".ort"


@dataclass(frozen=True)
class ExportRequest:
    """The variants to export, and settings of their server.

    Attributes:
        variants: Names of variants; empty for the first that any server can run.
        name: Name of the model, None for the bundle's. Several variants of a bundle are NAME-VARIANT.
        instances: Number of instances on the processor, or on each GPU.
        max_batch_size: Largest batch that Triton may form; 0 leaves requests as they are.
    """

    variants: tuple[str, ...] = ()
    name: str | None = None
    instances: int = 1
    max_batch_size: int = 0


@dataclass(frozen=True)
class ExportedModel:
    """One variant of a bundle as a model of the repository.

    Attributes:
        name: Its name in the repository.
        bundle: Name of the bundle's model.
        variant: Name of the variant.
        source_sha256: Digest of the model the bundle was prepared from.
        prepared_with: Version of ONNX Runtime it was prepared with, "" if that is not recorded.
        files: Its files in the export; bytes and digests are the bundle's.
        config_sha256: Digest of its `config.pbtxt`, so that no later export replaces one that was edited.
        left_out: Recorded options and other properties that it does not have.
        needs: Requirements of the variant, which its server does not check.
    """

    name: str
    bundle: str
    variant: str
    source_sha256: str
    prepared_with: str
    files: tuple[FileEntry, ...]
    config_sha256: str
    left_out: tuple[str, ...]
    needs: tuple[str, ...]


def export_triton(
    bundles: Sequence[Path], repository: Path, request: ExportRequest | None = None
) -> tuple[ExportedModel, ...]:
    """Writes bundles' variants as models of a Triton repository; other models there are left alone.

    Args:
        bundles: The bundles' folders.
        repository: The repository's folder; it is made.
        request: Variants, and settings of the server.

    Raises:
        ExportError: No variant runs everywhere and none was named, Triton cannot serve one or this machine
            cannot try it, two models have one name, or something else has a model's place.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    request = request or ExportRequest()
    import_messages()
    repository = _resolve_destination(repository, bundles)
    sources = [read_source(bundle) for bundle in bundles]
    choices = [choose_variants(source.config, request.variants) for source in sources]
    named = [
        {_name_model(source, variant, request, len(variants)): variant for variant in variants}
        for source, variants in zip(sources, choices, strict=True)
    ]
    names = Counter(name for one in named for name in one)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ExportError(f"two models with the same name\n  expected one each, got {', '.join(twice)} twice")
    for name in names:
        _check_replaceable(repository / name)
    return tuple(
        _export(source, variant, repository / name, request)
        for source, models in zip(sources, named, strict=True)
        for name, variant in models.items()
    )


def _name_model(source: SourceBundle, variant: Variant, request: ExportRequest, count: int) -> str:
    """Returns the name of a variant's model in the repository."""
    base = request.name or source.config.name
    name = base if count == 1 else f"{base}-{variant.name}"
    if not is_safe_name(name):
        raise ExportError(
            f"not a name for a Triton model\n  expected letters, digits, '.', '_', '-', got {name!r}"
        )
    return name


def _export(
    source: SourceBundle, variant: Variant, destination: Path, request: ExportRequest
) -> ExportedModel:
    """Writes one model: its files, which are tried, its configuration and the record."""
    options = plan_options(variant)
    model_file, folder = _plan_layout(variant)
    feeds, answers = read_golden(golden_of(source.config, variant), source.root)
    with new_folder(destination) as place:
        files = place_files(source, variant, place, folder, model_file)
        interface = try_model(source.root, variant, options, place / folder / model_file)
        shapes = {name: one.shape for name, one in answers.items()}
        shapes |= {name: array.shape for name, array in feeds.items()}
        interface = correct_ranks(interface, shapes)
        config = build_config(
            destination.name,
            model_file,
            interface,
            options,
            instances=request.instances,
            max_batch_size=request.max_batch_size,
        )
        (place / CONFIG_FILE).write_text(format_config(config), encoding="utf-8")
        exported = ExportedModel(
            name=destination.name,
            bundle=source.config.name,
            variant=variant.name,
            source_sha256=source.manifest.source.sha256,
            prepared_with=str(source.manifest.environment.get("onnxruntime", "")),
            files=files,
            config_sha256=digest_file(place / CONFIG_FILE),
            left_out=options.left_out,
            needs=tuple(describe_needs(variant)),
        )
        record = {
            "schema_version": EXPORT_SCHEMA_VERSION,
            "pipeline_version": ortprep.__version__,
            "model": encode(exported),
        }
        write_json_atomic(place / EXPORT_FILE, record)
    return exported


def _plan_layout(variant: Variant) -> tuple[str, str]:
    """Returns the name of the model's file, and the folder of the variant's files.

    Triton expects several files in a folder that has the name of the model's file.
    """
    suffix = PurePosixPath(variant.model).suffix
    is_alone = len(variant.files) == 1
    if suffix == _ORT_FORMAT and not is_alone:
        raise ExportError(
            f"cannot export variant {variant.name!r} for Triton\n"
            "  expected one file, since several are in a folder whose model is model.onnx, got "
            f"{len(variant.files)} of ONNX Runtime's own format"
        )
    model_file = f"model{_ORT_FORMAT}" if suffix == _ORT_FORMAT else "model.onnx"
    return model_file, _VERSION if is_alone else f"{_VERSION}/{model_file}"


def _resolve_destination(out: Path, bundles: Sequence[Path]) -> Path:
    """Returns the folder of an export, links followed; raises if it is a file or inside a bundle."""
    place = Path(os.path.realpath(out))
    for bundle in bundles:
        if place.is_relative_to(os.path.realpath(bundle)):
            raise ExportError(
                f"will not export into a bundle\n  expected a folder outside {bundle}, got {out}",
                hint="choose another --out",
            )
    if place.exists() and not place.is_dir():
        raise ExportError(
            f"will not overwrite {out}\n  expected a folder, got a file", hint="choose another --out"
        )
    return place


def _check_replaceable(folder: Path) -> None:
    """Raises unless a folder is absent, empty, or an export without files that a user added or edited."""
    if folder.is_symlink():
        raise ExportError(f"will not replace a link: {folder}", hint="remove it yourself")
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    got = "something else"
    with suppress(BundleError, OSError, KeyError):
        model = decode(ExportedModel, read_json(folder / EXPORT_FILE)["model"])
        listed = {EXPORT_FILE, CONFIG_FILE, *(entry.path for entry in model.files)}
        paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        found = {path.relative_to(folder).as_posix() for path in paths}
        changed = {CONFIG_FILE} if digest_file(folder / CONFIG_FILE) != model.config_sha256 else set()
        if not (own := sorted(found - listed | changed)):
            return
        got = f"one with files that were added or changed: {', '.join(map(repr, own[:5]))}"
    raise ExportError(
        f"will not overwrite {folder}\n"
        f"  expected no such folder, or an unchanged export of ortprep, got {got}",
        hint="choose another --out, or move what is yours elsewhere and remove the folder",
    )


def choose_variants(config: LoaderConfig, names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Returns the variants that were named, or else the first that any processor can run.

    Raises:
        ExportError: A name is not a variant's, or nothing was named and no variant runs everywhere.
    """
    listed = ", ".join(one.name for one in config.variants)
    if not names:
        for variant in config.variants:
            if _runs_anywhere(variant.requirements):
                return (variant,)
        raise ExportError(
            f"no variant of {config.name} runs on every server\n  expected the name of one of {listed}",
            hint="--variant NAME; its needs are listed",
        )
    chosen = {name: find_variant(config, name) for name in names}
    for name, found in chosen.items():
        if found is None:
            raise ExportError(f"no such variant of {config.name}: {name!r}\n  expected one of {listed}")
    return tuple(filter(None, chosen.values()))


def _runs_anywhere(needs: Requirements) -> bool:
    return needs.onnxruntime.below is None and describe_processor(needs) is None and not needs_gpu(needs)


def describe_versions(versions: VersionRange) -> str:
    """Returns a range of versions of ONNX Runtime in words."""
    upper = "" if versions.below is None else f" and < {versions.below}"
    return f"ONNX Runtime >= {versions.minimum}{upper}"


def describe_processor(needs: Requirements) -> str | None:
    """Returns in words what a processor must have and must not have, None if any will do."""
    if needs.machine is None and not needs.cpu_features and not needs.cpu_features_absent:
        return None
    words = "a processor" if needs.machine is None else f"a processor of kind {needs.machine}"
    words += f" with {', '.join(needs.cpu_features)}" if needs.cpu_features else ""
    return words + (f", without {', '.join(needs.cpu_features_absent)}" if needs.cpu_features_absent else "")


def describe_needs(variant: Variant) -> Iterator[str]:
    """Yields what a server must have, and its callers must do, for a variant to answer as recorded."""
    needs = variant.requirements
    yield describe_versions(needs.onnxruntime)
    if (processor := describe_processor(needs)) is not None:
        yield f"{processor}; elsewhere it may fail in its first run, or silently give wrong answers"
    if needs.compute_capability is not None:
        bounds = needs.compute_capability.minimum, needs.compute_capability.below
        low, below = (".".join(map(str, one)) for one in bounds)
        yield f"a GPU of compute capability >= {low} and < {below}"
