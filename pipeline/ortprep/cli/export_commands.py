"""The commands that lay bundles out for other servers: `export triton` and `export ort-package`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortprep.bundle.codec import encode
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Output, Precision, app, command, find_bundle
from ortprep.cli.console import Block, Talk
from ortprep.runtime.loading.load_options import check_choice
from ortprep.runtime.loading.variant_selection import FASTEST, PRECISIONS
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.versions import parse_version

if TYPE_CHECKING:
    from ortprep.export.result import ExportRequest, ExportResult

export_app = typer.Typer(help="Write bundles in the layout of other servers.", no_args_is_help=True)
app.add_typer(export_app, name="export")

Bundles = Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Models, or paths of bundles.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="V", help="Export this one, even if not known to fit; may be repeated."
    ),
]
Target = Annotated[str | None, typer.Option(metavar="T", help="cpu or cuda; by default the first that fits.")]
Version = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="The server's ONNX Runtime; unknown by default."),
]
Here = Annotated[bool, typer.Option("--here", help="The server has this machine's processor and GPUs.")]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the export; by default the bundle's.")
]


_subcommand = functools.partial(command, group=export_app)


@_subcommand
def triton(
    bundles: Bundles,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The model repository; other models in it stay.")],
    artifacts: Artifacts = ARTIFACTS,
    variant: Variants = None,
    target: Target = None,
    precision: Precision = FASTEST,
    onnxruntime: Version = None,
    here: Here = False,
    name: Name = None,
    instances: Annotated[int, typer.Option(min=1, max=1024, help="Instances on the CPU, or per GPU.")] = 1,
    max_batch_size: Annotated[
        int,
        typer.Option(
            min=0, max=65_536, help="Maximum number of rows in a batch that Triton forms; 0 for no batching."
        ),
    ] = 0,
    json: AsJson = False,
) -> Output:
    """Write a model repository of NVIDIA Triton, for its ONNX Runtime backend."""
    from ortprep.export.triton import export_triton

    if name is not None and len(bundles) > 1:
        raise typer.BadParameter("expected one bundle with it", param_hint="--name")
    request = _request(variant, target, precision, onnxruntime, here=here, name=name)
    request = dataclasses.replace(request, instances=instances, max_batch_size=max_batch_size)
    folders = [find_bundle(bundle, artifacts) for bundle in bundles]
    return _show(export_triton(folders, out, request))


@_subcommand
def ort_package(
    bundles: Bundles,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The package's folder.")],
    artifacts: Artifacts = ARTIFACTS,
    variant: Variants = None,
    target: Target = None,
    precision: Precision = FASTEST,
    onnxruntime: Version = None,
    here: Here = False,
    name: Name = None,
    json: AsJson = False,
) -> Output:
    """Write an ONNX Runtime model package (1.32 or newer), with one component per bundle."""
    from ortprep.export.ort_package import export_package

    request = _request(variant, target, precision, onnxruntime, here=here, name=name)
    folders = [find_bundle(bundle, artifacts) for bundle in bundles]
    return _show(export_package(folders, out, request))


def _request(
    variants: list[str] | None,
    target: str | None,
    precision: str,
    onnxruntime: str | None,
    *,
    here: bool,
    name: str | None,
) -> ExportRequest:
    """Returns the request that both layouts have in common."""
    from ortprep.export.result import ExportRequest

    check_choice("precision", precision, (FASTEST, *PRECISIONS))
    if onnxruntime is not None and parse_version(onnxruntime) is None:
        raise typer.BadParameter(f"expected a version, got {onnxruntime!r}", param_hint="--onnxruntime")
    hardware = read_hardware() if here else None
    return ExportRequest(tuple(variants or ()), target, precision, onnxruntime, hardware, name)


def _show(exported: ExportResult) -> Output:
    """Returns what an export has, and which variants it passed over."""
    from ortprep.export.result import describe_model

    blocks: list[Block] = [Talk(f"passed over {passed}") for passed in exported.passed_over]
    blocks += [str(exported.path), *itertools.chain(*map(describe_model, exported.models))]
    return Output(encode(exported) | {"path": str(exported.path)}, blocks)
