"""A Triton model repository: a folder per model, each written whole or not at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ortprep.bundle.atomic import new_folder
from ortprep.bundle.loader_config import Variant, golden_of
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import ExportError
from ortprep.export.export_result import ExportedModel, ExportResult
from ortprep.export.files import PlannedFile, SourceBundle, place_files, plan_files, read_source
from ortprep.export.interface import resolve_interface
from ortprep.export.option_mapping import UnmappedOption
from ortprep.export.record import check_replaceable, resolve_destination, write_export_record
from ortprep.export.trial import TrialRun, try_model
from ortprep.export.triton.model_config import (
    TritonModel,
    format_config,
    require_messages,
)
from ortprep.export.triton.settings import TritonSettings, plan_settings
from ortprep.export.triton.tensors import WarmUp, describe_tensor, plan_warm_up
from ortprep.export.variant_selection import (
    ExportOptions,
    Server,
    VariantChoice,
    choose_variants,
    describe_needs,
)
from ortprep.runtime.loading.variant_resolver import build_plan
from ortprep.runtime.tensors.arrays import fit_feeds
from ortprep.runtime.verification.golden import read_golden

LAYOUT = "triton"
_VERSION = "1"
_ORT_FORMAT = ".ort"


@dataclass(frozen=True)
class TritonRequest:
    """How a bundle is to be served.

    Attributes:
        options: Which variants.
        server: What is known of the server.
        name: Of the model in the repository; None for the bundle's, and with several variants NAME-VARIANT.
        instances: Instances on the processor, or on each GPU.
        max_batch_size: Largest batch Triton may make of requests; 0 leaves requests as they are.
    """

    options: ExportOptions = field(default_factory=ExportOptions)
    server: Server = field(default_factory=Server)
    name: str | None = None
    instances: int = 1
    max_batch_size: int = 0


@dataclass(frozen=True)
class _Planned:
    """A bundle with the names that its variants get."""

    source: SourceBundle
    choice: VariantChoice
    named: Mapping[str, Variant]


def export_triton(
    bundles: Sequence[Path], repository: Path, request: TritonRequest | None = None
) -> tuple[ExportResult, ...]:
    """Writes bundles' variants as models of a Triton repository; other models there are left alone.

    Args:
        bundles: The bundles' folders.
        repository: The repository's folder; it is made.
        request: How they are to be served.

    Returns:
        What was written of each bundle.

    Raises:
        ExportError: No variant fits, Triton cannot serve one, two models have one name, or something else has
            a model's place; nothing was written.
        MissingExtraError: Triton's messages are not installed.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    wanted = request or TritonRequest()
    require_messages()
    repository = resolve_destination(repository, bundles)
    planned = [_plan(bundle, wanted) for bundle in bundles]
    names = Counter(name for one in planned for name in one.named)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ExportError(f"two models with the same name\n  expected one each, got {', '.join(twice)} twice")
    for name in names:
        if (repository / name).is_symlink():
            raise ExportError(f"will not replace a link: {repository / name}", hint="remove it yourself")
        check_replaceable(repository / name, layout=LAYOUT)
    return tuple(
        ExportResult(
            repository,
            tuple(
                _export_variant(one.source, variant, repository / name, wanted)
                for name, variant in one.named.items()
            ),
            one.choice.passed_over,
        )
        for one in planned
    )


def _plan(bundle: Path, request: TritonRequest) -> _Planned:
    source = read_source(bundle)
    choice = choose_variants(source.config, request.options, request.server)
    variants = choice.variants
    named = {_name_model(source, variant, request, len(variants)): variant for variant in variants}
    return _Planned(source, choice, named)


def _name_model(source: SourceBundle, variant: Variant, request: TritonRequest, count: int) -> str:
    base = request.name or source.config.name
    name = base if count == 1 else f"{base}-{variant.name}"
    if not is_safe_name(name):
        raise ExportError(
            f"not a name for a Triton model\n  expected letters, digits, '.', '_', '-', got {name!r}"
        )
    return name


def _export_variant(
    source: SourceBundle, variant: Variant, destination: Path, request: TritonRequest
) -> ExportedModel:
    settings = plan_settings(variant, onnxruntime=request.server.onnxruntime)
    model_file, placed = _plan_layout(variant)
    with new_folder(destination) as folder:
        place_files(source.root, variant, placed, folder)
        trial = _try(source, variant, settings, _find_model(folder, variant, placed))
        model, left_out = _describe_model(source, variant, trial, settings, request)
        model = dataclasses.replace(model, name=destination.name, model_file=model_file)
        _write_warm_up(folder, model.warm_up)
        (folder / "config.pbtxt").write_text(format_config(model), encoding="utf-8")
        exported = ExportedModel(
            name=model.name,
            bundle=source.config.name,
            variant=variant.name,
            source_sha256=source.manifest.source.sha256,
            prepared_with=source.prepared_with,
            files=tuple(one.entry for one in placed),
            carried=settings.carried,
            left_out=left_out,
            needs=tuple(describe_needs(variant)),
            trial=str(trial),
        )
        write_export_record(folder, LAYOUT, (exported,))
    return exported


def _plan_layout(variant: Variant) -> tuple[str, tuple[PlannedFile, ...]]:
    """Returns what Triton calls the model, a file or else a folder around several, and where files go."""
    suffix = PurePosixPath(variant.model).suffix
    alone = len(variant.files) == 1
    if suffix == _ORT_FORMAT and not alone:
        raise ExportError(
            f"cannot export variant {variant.name!r} for Triton\n"
            "  expected one file, since several are in a folder whose model is model.onnx, got "
            f"{len(variant.files)} of ONNX Runtime's own format"
        )
    model_file = f"model{_ORT_FORMAT}" if suffix == _ORT_FORMAT else "model.onnx"
    folder = _VERSION if alone else f"{_VERSION}/{model_file}"
    return model_file, plan_files(variant, folder, model=model_file)


def _find_model(folder: Path, variant: Variant, placed: tuple[PlannedFile, ...]) -> Path:
    return folder / next(one.path for one in placed if one.source.path == variant.model)


def _try(source: SourceBundle, variant: Variant, settings: TritonSettings, model: Path) -> TrialRun:
    plan = build_plan(source.root, variant)._replace(
        model=str(model.absolute()),
        session_options=settings.session_options,
        providers=settings.providers,
    )
    return try_model(source.root, variant, plan)


def _describe_model(
    source: SourceBundle, variant: Variant, trial: TrialRun, settings: TritonSettings, request: TritonRequest
) -> tuple[TritonModel, tuple[UnmappedOption, ...]]:
    feeds, answers = read_golden(golden_of(source.config, variant), source.root)
    shapes = {name: one.shape for name, one in answers.items()}
    shapes |= {name: array.shape for name, array in feeds.items()}
    specs = resolve_interface(source.config, variant, trial, shapes)
    batched = request.max_batch_size > 0
    inputs, outputs = (tuple(describe_tensor(one, batched=batched) for one in side) for side in specs)
    halves = [one.name for one in specs[0] if one.dtype == "float16"]
    warm_up = plan_warm_up(inputs, fit_feeds(feeds, halves), max_batch_size=request.max_batch_size)
    model = TritonModel(
        name=source.config.name,
        model_file="",
        max_batch_size=request.max_batch_size,
        instances=request.instances,
        inputs=inputs,
        outputs=outputs,
        settings=settings,
        warm_up=warm_up if isinstance(warm_up, WarmUp) else None,
    )
    unwarmed = () if isinstance(warm_up, WarmUp) else (UnmappedOption("warm-up", warm_up),)
    return model, (*settings.left_out, *unwarmed)


def _write_warm_up(folder: Path, warm_up: WarmUp | None) -> None:
    if warm_up is None:
        return
    (folder / "warmup").mkdir()
    for one in warm_up.inputs:
        (folder / "warmup" / one.file).write_bytes(one.data)
