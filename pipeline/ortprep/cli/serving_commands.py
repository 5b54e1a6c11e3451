"""The commands that serve and export: `host`, `place`, `serve-config`, `export triton`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import PRECISIONS, read_loader_config
from ortprep.cli.command import (
    ARTIFACTS,
    Artifacts,
    AsJson,
    Devices,
    Output,
    Precision,
    app,
    command,
    find_bundle,
)
from ortprep.cli.console import echo, format_yaml, write_json, write_line
from ortprep.errors import PoolError, SpecError
from ortprep.runtime.host.models import HostConfig
from ortprep.runtime.host.process import read_status, serve_models, stop_host
from ortprep.runtime.loading.load_options import DigestPolicy, check_choice
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import FASTEST
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.tables import count_of

if TYPE_CHECKING:
    from ortprep.export.repository import ExportedModel
    from ortprep.ray_inference.pinning import PinnedBundle


@command
def place(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Models, or paths of bundles.")],
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    precision: Precision = FASTEST,
    json: AsJson = False,
) -> Output:
    """Show which device a pool would give each of these bundles, and why."""
    from ortprep.cli.tables import build_placement_table
    from ortprep.runtime.placement import place_bundles, resolve_devices

    folders = [find_bundle(name, artifacts) for name in bundles]
    names = [path.resolve().name for path in folders]
    paths = {
        name if names.count(name) == 1 else str(path): path for name, path in zip(names, folders, strict=True)
    }
    check_choice("precision", precision, (FASTEST, *PRECISIONS))
    places = resolve_devices(devices or "all", read_hardware())
    loads, placement = place_bundles(paths, places, precision=precision)
    table = build_placement_table(loads, placement)
    return Output({"loads": loads, "placement": placement}, [table, *placement.reasons])


@command
def serve_config(
    bundles: Annotated[
        list[str],
        typer.Argument(metavar="BUNDLE", help="Models, paths of bundles, or registry references."),
    ],
    artifacts: Artifacts = ARTIFACTS,
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu or cuda; by default that of the first variant.")
    ] = "all",
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Replicas at the start.")] = 1,
    cpus: Annotated[
        float | None,
        typer.Option(min=0.1, help="Processors per replica; by default the threads bundles set, else 1."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address for HTTP; 0.0.0.0 for every address of a node.")
    ] = "127.0.0.1",
    token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the token of clients, on every node.")
    ] = None,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    precision: Precision = FASTEST,
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of YAML.")] = False,
) -> Output:
    """Print the config file with which `serve run` and `serve deploy` serve bundles."""
    from ortprep.ray_inference.config import ServeConfig
    from ortprep.ray_inference.pinning import pin_version
    from ortprep.ray_inference.serve_file import build_serve_file, is_loopback
    from ortprep.runtime.loading.model_load_options import ModelLoadOptions

    config = ServeConfig(
        device=device,
        replicas=replicas,
        load=ModelLoadOptions(precision=precision),
        cpus=cpus,
        token_file=token_file,
    )
    config.check()
    if not is_loopback(host) and token_file is None:
        echo(f"warning: anyone who reaches {host} can send requests; --token-file prevents that")
    models: dict[str, PinnedBundle] = {}
    for bundle in bundles:
        name, pinned = pin_version(bundle if "://" in bundle else str(find_bundle(bundle, artifacts)))
        if name in models:
            raise PoolError(f"two bundles of one name: {name}\n  expected every model once")
        models[name] = pinned
    file = build_serve_file(models, config, host=host, http_port=http_port)
    return Output(file, format_yaml(file).splitlines())


_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"M": 2**20, "G": 2**30}


@command
def host(
    bundles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BUNDLE", help="Models that clients may name, paths of bundles, or references."
        ),
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    idle: Annotated[
        str | None, typer.Option(metavar="TIME", help="End after so long without a request: 90s, 10m, 8h.")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Drop models unused for longest above this memory: 500M, 4G."),
    ] = None,
    digests: Annotated[str, typer.Option(metavar="POLICY", help="changed, full or off, as for load.")] = (
        "changed"
    ),
    precision: Precision = FASTEST,
    require_signature: Annotated[
        str | None, typer.Option(metavar="KEY", help="Refuse bundles not signed with this public key.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show your running host.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End your running host.")] = False,
    json: AsJson = False,
) -> None:
    """Keep models loaded for your programs: `ortprep.runtime.connect("mynet")`."""
    if status:
        _show_status(as_json=json)
    elif stop:
        pid = stop_host()
        echo("no host runs" if pid is None else f"host ended: process {pid}")
    else:
        check_choice("precision", precision, (FASTEST, *PRECISIONS))
        check_choice("digests", digests, ("changed", "full", "off"))
        config = HostConfig(
            models=_find_models(bundles or [], artifacts, require_signature),
            idle_s=None if idle is None else _parse(idle, _SECONDS, "--idle", "90s, 10m or 8h"),
            max_memory_bytes=None if max_memory is None else _parse(max_memory, _BYTES, "--max-memory", "4G"),
            digests=cast(DigestPolicy, digests),
            precision=precision,
            require_signature=require_signature,
        )
        names = ", ".join(config.models) or "models by their folders"
        if not serve_models(config, on_ready=lambda: echo(f"host is ready: {names}")):
            echo("warning: ended while a request was running")


def _find_models(bundles: list[str], artifacts: Artifacts, require_signature: str | None) -> dict[str, str]:
    """Returns the paths of bundles by their models' names."""
    models: dict[str, str] = {}
    for bundle in bundles:
        is_reference = "://" in bundle
        folder = (
            locate(bundle, require_signature=require_signature)
            if is_reference
            else find_bundle(bundle, artifacts)
        )
        name = read_loader_config(folder).name
        if not folder.samefile(models.setdefault(name, str(folder.absolute()))):
            raise SpecError(f"two models have the name {name}\n  got {models[name]} and {folder}")
    return models


def _parse(text: str, units: dict[str, int], option: str, example: str) -> int:
    found = re.fullmatch(rf"(\d{{1,9}})([{''.join(units)}])", text)
    if found is None:
        raise typer.BadParameter(f"expected a number with a unit, as in {example}", param_hint=option)
    return int(found[1]) * units[found[2]]


def _show_status(*, as_json: bool) -> None:
    """Prints what the host says of itself; exits with 1 if none runs."""
    found = read_status()
    if as_json:
        write_json(found)
    elif found is None:
        echo("no host runs")
    if found is None:
        raise typer.Exit(1)
    if as_json:
        return
    memory = found["private_bytes"] / 2**20
    write_line(
        f"process {found['pid']}, up for {found['up_s']} s: {found['requests']} requests, "
        f"{found['clients']} clients, {memory:.0f} MiB of private memory"
    )
    for model in found["models"]:
        state = f"loaded, variant {model['variant']}" if model["variant"] else "not loaded"
        write_line(f"{model['name'] or '-'}  {model['bundle']}  {state}")
    if left_out := found["models_left_out"]:
        write_line(f"and {count_of(left_out, 'model')} more")


export_app = typer.Typer(help="Write bundles in the layout of other servers.", no_args_is_help=True)
app.add_typer(export_app, name="export")


@functools.partial(command, group=export_app)
def triton(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE", help="Models, or paths of bundles.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The model repository; other models in it stay.")],
    artifacts: Artifacts = ARTIFACTS,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="V", help="Export this one, whatever it needs; may be repeated."),
    ] = None,
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
    from ortprep.export.repository import ExportRequest, export_triton

    if name is not None and len(bundles) > 1:
        raise typer.BadParameter("expected one bundle with it", param_hint="--name")
    request = ExportRequest(tuple(variant or ()), name, instances, max_batch_size)
    models = export_triton([find_bundle(bundle, artifacts) for bundle in bundles], out, request)
    blocks = [str(out.resolve()), *itertools.chain(*map(_describe_model, models))]
    return Output({"path": str(out.resolve()), "models": encode(models)}, blocks)


def _describe_model(model: ExportedModel) -> Iterator[str]:
    """Yields the lines that describe one exported model: its needs, and the options that it lacks."""
    size_mb = sum(entry.size_bytes for entry in model.files) / 2**20
    prepared = f", prepared with ONNX Runtime {model.prepared_with}" if model.prepared_with else ""
    yield f"{model.name}: variant {model.variant} of {model.bundle}, {size_mb:.1f} MB{prepared}"
    yield "  loaded with the options that are left, it answers the golden sample as recorded"
    yield "  needs, and its server does not check:"
    yield from (f"    {need}" for need in model.needs)
    yield "  left out (docs/export.md has the costs):" if model.left_out else "  left out: nothing"
    yield from (f"    {what}" for what in model.left_out)
