"""ONNX Runtime's model packages, written whole or not at all by its own `onnxruntime.ModelPackage` (1.32).

Entries of `session_options` go through `AddSessionConfigEntry` of the C interface. Since ONNX Runtime 1.28
it also takes the plain options of a session, under names and values of their own. Tried on 1.31.1: a bad
value is refused when the session is made, an entry that it does not know does nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import ortprep
from ortprep.bundle.atomic import new_folder, write_json_atomic
from ortprep.bundle.loader_config import Variant
from ortprep.errors import ExportError
from ortprep.export.option_mapping import (
    ATTRIBUTE,
    ENTRY,
    LEVEL,
    MappedOptions,
    Place,
    RecordedOption,
    map_options,
)
from ortprep.export.placement import SourceBundle, place_variant, read_source
from ortprep.export.result import (
    ExportedModel,
    ExportRequest,
    ExportResult,
    check_replaceable,
    resolve_destination,
    write_export_record,
)
from ortprep.export.variant_selection import choose_variants
from ortprep.options import NEWEST, format_option, known_attributes, known_session_config
from ortprep.runtime.loading.session import import_onnxruntime, onnxruntime_errors
from ortprep.runtime.loading.variant_selection import PassedOver, needs_gpu

LAYOUT = "ort-package"

FORBIDDEN = frozenset(
    {
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.enable_profiling",
        "session.optimized_model_filepath",
    }
)
"""Entries that make a session write files: a package with one does not open."""

PATHS = frozenset({"session.model_external_initializers_file_folder_path", "ep.context_file_path"})
"""Entries whose value is a path, which is resolved in the package."""

_OTHER_NAMES = {"logid": "log_id"}
_LOWER_CASE = (LEVEL, "execution_mode")
_PROPERTIES = {"first phase": "a package describes only one session, the one for steady runs"}


def export_package(
    bundles: Sequence[Path], package: Path, request: ExportRequest | None = None
) -> ExportResult:
    """Writes bundles as the components of one model package.

    Args:
        bundles: Folders, at least one.
        package: The package's folder; an earlier export there is replaced.
        request: Variants of the bundles, and name of the package.

    Raises:
        ExportError: ONNX Runtime is older than 1.32, no variant fits, two bundles have one name, or something
            else is there.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    request = request or ExportRequest()
    onnxruntime = _import_package_interface()
    package = resolve_destination(package, bundles)
    check_replaceable(package, layout=LAYOUT)
    sources = [read_source(bundle) for bundle in bundles]
    if not sources:
        raise ExportError("no bundle to export\n  expected one or more")
    names = Counter(one.config.name for one in sources)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ExportError(
            f"two bundles with the same name\n  expected one component each, got {', '.join(twice)}"
        )
    choices = [choose_variants(source.config, request, per_provider=True) for source in sources]
    models: list[ExportedModel] = []
    passed_over: list[PassedOver] = []
    with new_folder(package) as folder:
        components: dict[str, dict[str, Any]] = {}
        for source, (variants, passed) in zip(sources, choices, strict=True):
            exported, components[source.config.name] = _place_component(folder, source, variants)
            models += exported
            passed_over += passed
        _write_documents(onnxruntime, folder, request.name or sources[0].config.name, components)
        write_export_record(folder, LAYOUT, models)
    return ExportResult(package, tuple(models), tuple(passed_over))


def _import_package_interface() -> Any:
    """Returns the module `onnxruntime`, or raises if it cannot write packages."""
    onnxruntime = import_onnxruntime()
    if not hasattr(onnxruntime, "ModelPackage"):
        raise ExportError(
            "this ONNX Runtime cannot write model packages\n"
            f"  expected 1.32 or newer, got {onnxruntime.__version__}",
            hint="pip install 'onnxruntime>=1.32'   (or onnxruntime-gpu; in an environment of its own)",
        )
    return onnxruntime


def _write_documents(
    onnxruntime: Any, folder: Path, name: str, components: Mapping[str, Mapping[str, Any]]
) -> None:
    """Describes the files that are there, and has ONNX Runtime read what it wrote."""
    # `ModelPackage` takes folders of variants only in a package that it has opened.
    write_json_atomic(folder / "manifest.json", {"schema_version": "1.0", "components": {}})
    metadata = {"ortprep": {"pipeline_version": ortprep.__version__}}
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
    folder: Path, source: SourceBundle, variants: Sequence[Variant]
) -> tuple[list[ExportedModel], dict[str, Any]]:
    """Places a component's files; returns its models, and its variants as a package describes them.

    ONNX Runtime takes the first variant of a provider.
    """
    models: list[ExportedModel] = []
    described: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for variant in variants:
        options = plan_options(variant)
        home = f"components/{source.config.name}/{variant.name}"
        model_file = f"model{PurePosixPath(variant.model).suffix}"
        model, _ = place_variant(source, variant, folder, home, model_file, options)
        if variant.io_binding:
            model = replace(model, needs=(*model.needs, "inputs and outputs bound to fixed memory"))
        first = chosen.setdefault(variant.providers[0].name, variant.name)
        if first != variant.name:
            reason = f"ONNX Runtime takes the first of {variant.providers[0].name}, {first}"
            model = replace(model, left_out={**model.left_out, "being chosen": reason})
        models.append(model)
        described[variant.name] = {
            "variant_directory": home,
            "ep": variant.providers[0].name,
            "executor_info": {"ort": {"model_file": model_file, **options.sections}},
            "additional_metadata": {
                "ortprep": {
                    "device": "gpu" if needs_gpu(variant.requirements) else "cpu",
                    "precision": variant.precision,
                    "source_sha256": model.source_sha256,
                }
            },
        }
    return models, described


def plan_options(variant: Variant) -> MappedOptions:
    """Returns a variant's options as `session_options` and `provider_options` of a model package."""
    attributes = {_entry_of(one.name) for one in known_attributes(NEWEST)}
    entries = {one.name for one in known_session_config(NEWEST)} - FORBIDDEN

    def find_place(option: RecordedOption) -> Place | str:
        kind, name, value = option
        if kind == ATTRIBUTE:
            if _entry_of(name) not in entries:
                return "a package has no entry for it; ONNX Runtime's default holds"
            text = str(value).removeprefix("ORT_").lower() if name in _LOWER_CASE else format_option(value)
            return Place("session_options", _entry_of(name), text)
        if kind == ENTRY:
            if name in attributes:
                return "Python, used to prepare the variant, ignores it; a package would not"
            refused = name in FORBIDDEN | PATHS
            return "not allowed in a package" if refused else Place("session_options", name, str(value))
        if kind != variant.providers[0].name:
            return "a package has options of one provider, the preferred one"
        return Place("provider_options", name, str(value))

    return map_options(variant, find_place, _PROPERTIES)


def _entry_of(attribute: str) -> str:
    """Returns the session entry that stands for an attribute of `SessionOptions`."""
    return f"session.{_OTHER_NAMES.get(attribute, attribute)}"
