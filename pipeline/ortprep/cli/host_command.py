"""`ortprep host`: keep models loaded for programs that start often."""

from __future__ import annotations

import re
from typing import Annotated, cast

import typer

from ortprep.bundle.loader_config import read_loader_config
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Precision, command, find_bundle
from ortprep.cli.console import echo, write_json, write_line
from ortprep.errors import SpecError
from ortprep.runtime.host.models import HostConfig
from ortprep.runtime.host.process import read_status, serve_models, stop_host
from ortprep.runtime.loading.load_options import DigestPolicy, check_choice
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import FASTEST, PRECISIONS

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
    """Returns the folders of bundles by their models' names."""
    models: dict[str, str] = {}
    for bundle in bundles:
        is_reference = "://" in bundle
        folder = (
            locate(bundle, require_signature=require_signature)
            if is_reference
            else find_bundle(bundle, artifacts)
        )
        name = read_loader_config(folder).name
        if models.setdefault(name, str(folder.resolve())) != str(folder.resolve()):
            raise SpecError(f"two models have the name {name}\n  got {models[name]} and {folder}")
    return models


def _parse(text: str, units: dict[str, int], option: str, example: str) -> int:
    found = re.fullmatch(rf"(\d{{1,9}})([{''.join(units)}])", text)
    if found is None:
        raise typer.BadParameter(f"expected a number with a unit, as in {example}", param_hint=option)
    return int(found[1]) * units[found[2]]


def _show_status(*, as_json: bool) -> None:
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
