"""NVIDIA Triton's model repository: a folder per model, each written whole or not at all.

What its ONNX Runtime backend takes is read from its source: triton-inference-server/onnxruntime_backend at
00fd3e8, after release 26.06, `src/onnxruntime.cc`. The model configuration is Triton's own protobuf message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ortprep.bundle.atomic import new_folder
from ortprep.bundle.loader_config import Variant, golden_of
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import ExportError
from ortprep.export.placement import SourceBundle, place_variant, read_source
from ortprep.export.result import (
    ExportedModel,
    ExportRequest,
    ExportResult,
    check_replaceable,
    resolve_destination,
    write_export_record,
)
from ortprep.export.triton_config import (
    add_warm_up,
    build_config,
    format_config,
    import_messages,
    resolve_interface,
)
from ortprep.export.triton_options import plan_options
from ortprep.export.variant_selection import choose_variants
from ortprep.runtime.tensors.arrays import fit_feeds
from ortprep.runtime.verification.golden import read_golden

LAYOUT = "triton"
_VERSION = "1"
_ORT_FORMAT = ".ort"


def export_triton(
    bundles: Sequence[Path], repository: Path, request: ExportRequest | None = None
) -> ExportResult:
    """Writes bundles' variants as models of a Triton repository; other models there are left alone.

    Args:
        bundles: The bundles' folders.
        repository: The repository's folder; it is made.
        request: Variants, and settings of the server.

    Raises:
        ExportError: No variant fits, Triton cannot serve one, two models have one name, or something else has
            a model's place; nothing was written.
        MissingExtraError: Triton's messages are not installed.
        LoadError: With the options that are left, a variant does not load or does not answer as recorded.
        BundleError: A bundle cannot be read, or is not what was written.
        OSError: The disk is full or read-only.
    """
    request = request or ExportRequest()
    import_messages()
    repository = resolve_destination(repository, bundles)
    sources = [read_source(bundle) for bundle in bundles]
    choices = [choose_variants(source.config, request) for source in sources]
    named = [
        {_name_model(source, variant, request, len(variants)): variant for variant in variants}
        for source, (variants, _) in zip(sources, choices, strict=True)
    ]
    names = Counter(name for one in named for name in one)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ExportError(f"two models with the same name\n  expected one each, got {', '.join(twice)} twice")
    for name in names:
        if (repository / name).is_symlink():
            raise ExportError(f"will not replace a link: {repository / name}", hint="remove it yourself")
        check_replaceable(repository / name, layout=LAYOUT)
    exported = [
        _export(source, variant, repository / name, request)
        for source, models in zip(sources, named, strict=True)
        for name, variant in models.items()
    ]
    passed_over = tuple(one for _, passed in choices for one in passed)
    return ExportResult(repository, tuple(exported), passed_over)


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
    """Writes one model: its files, which are tried, its warm-up, its configuration and the record."""
    options = plan_options(variant, onnxruntime=request.onnxruntime)
    model_file, folder = _plan_layout(variant)
    feeds, answers = read_golden(golden_of(source.config, variant), source.root)
    with new_folder(destination) as place:
        exported, trial = place_variant(source, variant, place, folder, model_file, options)

        shapes = {name: one.shape for name, one in answers.items()}
        shapes |= {name: array.shape for name, array in feeds.items()}
        interface = resolve_interface(source.config, variant, trial, shapes)
        config = build_config(destination.name, model_file, interface, options, request)

        halves = [one.name for one in interface[0] if one.dtype == "float16"]
        warm_up = add_warm_up(config, fit_feeds(feeds, halves))
        if isinstance(warm_up, str):
            exported = replace(exported, left_out={**exported.left_out, "warm-up": warm_up})
        else:
            (place / "warmup").mkdir()
            for name, data in warm_up.items():
                (place / "warmup" / name).write_bytes(data)

        (place / "config.pbtxt").write_text(format_config(config), encoding="utf-8")
        exported = replace(exported, name=destination.name)
        write_export_record(place, LAYOUT, [exported])
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
