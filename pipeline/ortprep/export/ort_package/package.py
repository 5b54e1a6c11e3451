"""A model package on disk: written whole or not at all, by ONNX Runtime's own Python interface."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import ortprep
from ortprep.bundle.atomic import new_folder, write_json_atomic
from ortprep.bundle.loader_config import Requirements, Variant
from ortprep.errors import ExportError
from ortprep.export.export_result import ExportedModel, ExportResult
from ortprep.export.files import SourceBundle, place_files, plan_files, read_source
from ortprep.export.option_mapping import UnmappedOption
from ortprep.export.ort_package.settings import PackageSettings, plan_settings
from ortprep.export.record import check_replaceable, resolve_destination, write_export_record
from ortprep.export.trial import try_model
from ortprep.export.variant_selection import (
    ExportOptions,
    Server,
    VariantChoice,
    choose_variants,
    describe_needs,
)
from ortprep.runtime.loading.session import import_onnxruntime, onnxruntime_errors
from ortprep.runtime.loading.variant_resolver import build_plan
from ortprep.runtime.loading.variant_selection import needs_gpu

LAYOUT = "ort-package"
_MANIFEST = "manifest.json"
_COMPONENTS = "components"
_NAMESPACE = "ortprep"


@dataclass(frozen=True)
class PackageRequest:
    """What a package is to hold.

    Attributes:
        options: Which variants of every bundle.
        server: What is known of where it is read.
        name: Name of the package; None for the first bundle's.
    """

    options: ExportOptions = field(default_factory=ExportOptions)
    server: Server = field(default_factory=Server)
    name: str | None = None


def export_package(
    bundles: Sequence[Path], package: Path, request: PackageRequest | None = None
) -> ExportResult:
    """Writes bundles as the components of one model package.

    Args:
        bundles: Folders, at least one.
        package: The package's folder; an earlier export there is replaced.
        request: What it is to hold.

    Raises:
        ExportError: ONNX Runtime is older than 1.32, no variant fits, two bundles have one name, or something
            else is there.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    request = request or PackageRequest()
    onnxruntime = _import_package_interface()
    package = resolve_destination(package, bundles)
    check_replaceable(package, layout=LAYOUT)
    sources = [read_source(bundle) for bundle in bundles]
    _require_names(sources)
    choices = [
        choose_variants(source.config, request.options, request.server, per_provider=True)
        for source in sources
    ]
    with new_folder(package) as folder:
        models: list[ExportedModel] = []
        components: dict[str, dict[str, Any]] = {}
        for source, choice in zip(sources, choices, strict=True):
            exported, described = _place_component(folder, source, choice)
            models += exported
            components[source.config.name] = described
        _write_documents(onnxruntime, folder, request.name or sources[0].config.name, components)
        write_export_record(folder, LAYOUT, tuple(models))
    return ExportResult(
        package, tuple(models), tuple(one for choice in choices for one in choice.passed_over)
    )


def _import_package_interface() -> Any:
    onnxruntime = import_onnxruntime()
    if not hasattr(onnxruntime, "ModelPackage"):
        raise ExportError(
            "this ONNX Runtime cannot write model packages\n"
            f"  expected 1.32 or newer, got {onnxruntime.__version__}",
            hint="pip install 'onnxruntime>=1.32'   (or onnxruntime-gpu; in an environment of its own)",
        )
    return onnxruntime


def _require_names(sources: Sequence[SourceBundle]) -> None:
    if not sources:
        raise ExportError("no bundle to export\n  expected one or more")
    twice = [name for name, count in Counter(one.config.name for one in sources).items() if count > 1]
    if twice:
        raise ExportError(
            f"two bundles with the same name\n  expected one component each, got {', '.join(twice)}"
        )


def _write_documents(
    onnxruntime: Any, folder: Path, name: str, components: Mapping[str, Mapping[str, Any]]
) -> None:
    """Describes the files that are there, and has ONNX Runtime read what it wrote."""
    # `ModelPackage` takes folders of variants only in a package that it has opened.
    write_json_atomic(folder / _MANIFEST, {"schema_version": "1.0", "components": {}})
    metadata = {_NAMESPACE: {"pipeline_version": ortprep.__version__}}
    try:
        written = onnxruntime.ModelPackage.open(str(folder))
        written.set_metadata(name=name)
        written.set_additional_metadata_json("manifest", json=json.dumps(metadata))
        for component, variants in components.items():
            body = {"component_name": component, "variants": variants}
            written.set_component_inline(component, json.dumps(body))
        written.commit()
        written.close()
        onnxruntime.ModelPackageContext(str(folder))
    except onnxruntime_errors() as error:
        raise ExportError(f"ONNX Runtime refuses the model package\n  {error}") from error


def _place_component(
    folder: Path, source: SourceBundle, choice: VariantChoice
) -> tuple[tuple[ExportedModel, ...], dict[str, Any]]:
    """Places a component's files; returns its models, and its variants as a package describes them.

    ONNX Runtime prefers the variant that comes first.
    """
    models: list[ExportedModel] = []
    described: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for variant in choice.variants:
        provider = variant.providers[0].name
        settings = plan_settings(variant)
        model_file = f"model{PurePosixPath(variant.model).suffix}"
        model = _place_variant(folder, source, variant, settings, model_file)
        left_out = list(model.left_out)
        if provider in chosen:
            reason = f"ONNX Runtime takes the first of {provider}, {chosen[provider]}"
            left_out.append(UnmappedOption("being chosen", reason))
        chosen.setdefault(provider, variant.name)
        model = replace(model, left_out=tuple(left_out))
        models.append(model)
        described[variant.name] = _describe(variant, settings, model, model_file)
    return tuple(models), described


def _place_variant(
    folder: Path, source: SourceBundle, variant: Variant, settings: PackageSettings, model_file: str
) -> ExportedModel:
    home = _home(source.config.name, variant)
    placed = plan_files(variant, home, model=model_file)
    place_files(source.root, variant, placed, folder)
    plan = build_plan(source.root, variant)._replace(
        model=str((folder / home / model_file).absolute()),
        session_options=settings.plan_options,
        providers=settings.plan_providers,
    )
    binding = ("inputs and outputs bound to fixed memory",) if variant.io_binding else ()
    return ExportedModel(
        name=f"{source.config.name}/{variant.name}",
        bundle=source.config.name,
        variant=variant.name,
        source_sha256=source.manifest.source.sha256,
        prepared_with=source.prepared_with,
        files=tuple(one.entry for one in placed),
        carried=settings.carried,
        left_out=settings.left_out,
        needs=(*describe_needs(variant), *binding),
        trial=str(try_model(source.root, variant, plan)),
    )


def _home(component: str, variant: Variant) -> str:
    return f"{_COMPONENTS}/{component}/{variant.name}"


def _device_of(variant: Variant) -> str:
    return "gpu" if needs_gpu(variant.requirements) else "cpu"


def _describe(
    variant: Variant, settings: PackageSettings, model: ExportedModel, model_file: str
) -> dict[str, Any]:
    ort: dict[str, Any] = {"model_file": model_file}
    if settings.session_options:
        ort["session_options"] = dict(settings.session_options)
    if settings.provider_options:
        ort["provider_options"] = dict(settings.provider_options)
    return {
        "variant_directory": _home(model.bundle, variant),
        "ep": variant.providers[0].name,
        "compatibility_string": compatibility_string(variant.requirements),
        "executor_info": {"ort": ort},
        "additional_metadata": {
            _NAMESPACE: {
                "device": _device_of(variant),
                "precision": variant.precision,
                "source_sha256": model.source_sha256,
            }
        },
    }


def compatibility_string(needs: Requirements) -> str:
    """Returns a variant's requirements in one line.

    Such a string is the execution provider's to define; those of CPU and CUDA define none and read none, so
    this one is for people and programs that know it.
    """
    return " ".join(("ortprep/1", *_constraints(needs)))


def _constraints(needs: Requirements) -> Iterator[str]:
    versions = needs.onnxruntime
    yield f"onnxruntime>={versions.minimum}" + (f",<{versions.below}" if versions.below else "")
    if needs.machine is not None:
        yield f"machine={needs.machine}"
    if needs.cpu_features:
        yield f"cpu-features={','.join(needs.cpu_features)}"
    if needs.cpu_features_absent:
        yield f"cpu-features-absent={','.join(needs.cpu_features_absent)}"
    if needs.compute_capability is not None:
        low, below = needs.compute_capability.minimum, needs.compute_capability.below
        yield f"compute-capability>={low[0]}.{low[1]},<{below[0]}.{below[1]}"
