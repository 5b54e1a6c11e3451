"""`ortprep export triton`: bundles in the layout of another server."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
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
    from ortprep.export.repository import ExportedModel

export_app = typer.Typer(help="Write bundles in the layout of other servers.", no_args_is_help=True)
app.add_typer(export_app, name="export")


@functools.partial(command, group=export_app)
def triton(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Models, or paths of bundles.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The model repository; other models in it stay.")],
    artifacts: Artifacts = ARTIFACTS,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="V", help="Export this one, even if not known to fit; may be repeated."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="cpu or cuda; by default the first that fits.")
    ] = None,
    precision: Precision = FASTEST,
    onnxruntime: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="The server's ONNX Runtime; unknown by default."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="The server has this machine's processor and GPUs.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model; by default the bundle's.")
    ] = None,
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
    from ortprep.export.repository import export_triton
    from ortprep.export.variant_selection import ExportRequest

    if name is not None and len(bundles) > 1:
        raise typer.BadParameter("expected one bundle with it", param_hint="--name")
    check_choice("precision", precision, (FASTEST, *PRECISIONS))
    if onnxruntime is not None and parse_version(onnxruntime) is None:
        raise typer.BadParameter(f"expected a version, got {onnxruntime!r}", param_hint="--onnxruntime")
    request = ExportRequest(
        variants=tuple(variant or ()),
        target=target,
        precision=precision,
        onnxruntime=onnxruntime,
        hardware=read_hardware() if here else None,
        name=name,
        instances=instances,
        max_batch_size=max_batch_size,
    )
    exported = export_triton([find_bundle(bundle, artifacts) for bundle in bundles], out, request)
    blocks: list[Block] = [Talk(f"passed over {passed}") for passed in exported.passed_over]
    blocks += [str(exported.path), *itertools.chain(*map(_describe_model, exported.models))]
    return Output(encode(exported) | {"path": str(exported.path)}, blocks)


def _describe_model(model: ExportedModel) -> Iterator[str]:
    """Yields the lines that describe one exported model: its needs, and the options it has and lacks."""
    size_mb = sum(entry.size_bytes for entry in model.files) / 2**20
    prepared = f", prepared with ONNX Runtime {model.prepared_with}" if model.prepared_with else ""
    yield f"{model.name}: variant {model.variant} of {model.bundle}, {size_mb:.1f} MB{prepared}"
    yield f"  {model.trial}"
    yield "  needs, and its server does not check:"
    yield from (f"    {need}" for need in model.needs)
    if model.carried:
        yield "  carried over:"
        yield from (f"    {option} -> {where}" for option, where in model.carried.items())
    yield "  left out:" if model.left_out else "  left out: nothing"
    yield from (f"    {what}: {reason}" for what, reason in model.left_out.items())
