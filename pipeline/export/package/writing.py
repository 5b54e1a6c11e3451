"""A model package on disk: written whole or not at all, and checked by the rules before it is seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pipeline.bundle.atomic import new_folder, write_json_atomic
from pipeline.bundle.loader_config import Variant
from pipeline.errors import ExportError
from pipeline.export.carrying import LeftOut
from pipeline.export.choosing import Choice, Server, Wish, choose_per_provider
from pipeline.export.exported import Exported, ExportedModel
from pipeline.export.files import place_files, plan_files
from pipeline.export.needs import describe_needs
from pipeline.export.package.documents import (
    COMPONENT_FILE,
    COMPONENTS,
    PackagedVariant,
    build_component,
    build_manifest,
    device_of,
)
from pipeline.export.package.rules import check_package
from pipeline.export.package.settings import plan_settings
from pipeline.export.record import check_replaceable, settle_destination, write_export_record
from pipeline.export.source import Source, read_source
from pipeline.export.trial import try_model
from pipeline.runtime.loading.variant_resolver import build_plan

LAYOUT = "ort-package"


@dataclass(frozen=True)
class PackageRequest:
    """What a package is to hold.

    Attributes:
        wish: Which variants of every bundle.
        server: What is known of where it is read.
        name: Of the package; None for the first bundle's.
        constrain_device: Whether variants say their `device`. Their execution provider says it already, and
            ONNX Runtime 1.31.1 gives nobody a variant of the CPU provider that does.
    """

    wish: Wish = field(default_factory=Wish)
    server: Server = field(default_factory=Server)
    name: str | None = None
    constrain_device: bool = False


def export_package(bundles: Sequence[Path], package: Path, request: PackageRequest | None = None) -> Exported:
    """Writes bundles as the components of one model package.

    Args:
        bundles: Folders, at least one.
        package: The package's folder; an earlier export there is replaced.
        request: What it is to hold.

    Raises:
        ExportError: No variant fits, two bundles have one name, or something else is there.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    wanted = request or PackageRequest()
    package = settle_destination(package, bundles)
    check_replaceable(package, layout=LAYOUT)
    sources = [read_source(bundle) for bundle in bundles]
    _require_names(sources)
    choices = [choose_per_provider(one.config, wanted.wish, wanted.server) for one in sources]
    with new_folder(package) as folder:
        models = tuple(
            exported
            for source, choice in zip(sources, choices, strict=True)
            for exported in _write_component(folder, source, choice, wanted)
        )
        names = [source.config.name for source in sources]
        write_json_atomic(folder / "manifest.json", build_manifest(wanted.name or names[0], names))
        write_export_record(folder, LAYOUT, models)
        check_package(folder)
    return Exported(package, models, tuple(one for choice in choices for one in choice.passed_over))


def _require_names(sources: Sequence[Source]) -> None:
    if not sources:
        raise ExportError("no bundle to export\n  expected one or more")
    twice = [name for name, count in Counter(one.config.name for one in sources).items() if count > 1]
    if twice:
        raise ExportError(f"two bundles of one name\n  expected one component each, got {', '.join(twice)}")


def _write_component(
    folder: Path, source: Source, choice: Choice, request: PackageRequest
) -> tuple[ExportedModel, ...]:
    home = f"{COMPONENTS}/{source.config.name}"
    packaged: list[PackagedVariant] = []
    for variant in choice.variants:
        earlier = next((one for one in packaged if _provider(one.variant) == _provider(variant)), None)
        one = _write_variant(folder, home, source, variant, constrain_device=request.constrain_device)
        if earlier is not None:
            reason = f"ONNX Runtime takes the first of {_provider(variant)}, {earlier.variant.name}"
            left_out = (*one.exported.left_out, LeftOut("being chosen", reason))
            one = dataclasses.replace(one, exported=dataclasses.replace(one.exported, left_out=left_out))
        packaged.append(one)
    write_json_atomic(folder / home / COMPONENT_FILE, build_component(source.config.name, packaged))
    return tuple(one.exported for one in packaged)


def _provider(variant: Variant) -> str:
    return variant.providers[0].name


def _write_variant(
    folder: Path, home: str, source: Source, variant: Variant, *, constrain_device: bool
) -> PackagedVariant:
    if variant.name == COMPONENT_FILE:
        raise ExportError(
            f"cannot pack variant {variant.name!r}\n  expected a name that is no file's of a package"
        )
    settings = plan_settings(variant)
    model_file = f"model{PurePosixPath(variant.model).suffix}"
    placed = plan_files(variant, f"{home}/{variant.name}", model=model_file)
    place_files(source.root, variant, placed, folder)
    plan = build_plan(source.root, variant)._replace(
        model=str((folder / home / variant.name / model_file).absolute()),
        session_options=settings.plan_options,
        providers=settings.plan_providers,
    )
    trial = try_model(source.root, variant, plan)
    device = LeftOut(
        f"device {device_of(variant)}",
        "not a condition, the execution provider says it; ONNX Runtime 1.31.1 finds no variant of the CPU "
        "provider that has it (--constrain-device writes it)",
    )
    exported = ExportedModel(
        name=f"{source.config.name}/{variant.name}",
        bundle=source.config.name,
        variant=variant.name,
        source_sha256=source.manifest.source.sha256,
        prepared_with=source.prepared_with(variant),
        files=tuple(one.entry for one in placed),
        carried=settings.carried,
        left_out=settings.left_out if constrain_device else (*settings.left_out, device),
        needs=(*describe_needs(variant), *_binding_need(variant)),
        trial=str(trial),
    )
    return PackagedVariant(variant, model_file, settings, exported, constrain_device)


def _binding_need(variant: Variant) -> tuple[str, ...]:
    return ("inputs and outputs bound to memory that stays the same",) if variant.io_binding else ()
