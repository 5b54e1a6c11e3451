"""The commands around pools: `place`, `serve-check`, and `serve-config` for Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortprep.cli.command import (
    ARTIFACTS,
    Artifacts,
    AsJson,
    Bundle,
    Devices,
    Output,
    Precision,
    command,
    find_bundle,
)
from ortprep.cli.console import echo, format_yaml
from ortprep.errors import PoolError
from ortprep.runtime.loading.load_options import check_choice
from ortprep.runtime.loading.variant_selection import FASTEST, PRECISIONS
from ortprep.runtime.machine.hardware import read_hardware

if TYPE_CHECKING:
    from ortprep.cluster.serving.config import ServeConfig
    from ortprep.cluster.serving.serve_file import BundleFigures


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
    from ortprep.runtime.placement.assignment import place_bundles
    from ortprep.runtime.placement.devices import resolve_devices

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
def serve_check(
    bundle: Bundle,
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    workers_per_device: Annotated[int, typer.Option(min=1, max=256, help="Processes per device.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Threads that send them.")] = 4,
    precision: Precision = FASTEST,
    json: AsJson = False,
) -> Output:
    """Load a bundle on every device at once, send its golden samples, and check every answer."""
    from ortprep.cli.tables import build_workers_table, describe_load_test
    from ortprep.doctor.load_test import load_test_bundle

    result, stats = load_test_bundle(
        find_bundle(bundle, artifacts),
        devices=devices or "all",
        workers_per_device=workers_per_device,
        requests=requests,
        clients=clients,
        precision=precision,
        observer=lambda event: echo(f"{event.name}: {event.state}"),
    )
    return Output(
        {"drive": result, "pool": stats},
        [build_workers_table(stats), *describe_load_test(result)],
        exit_code=1 if result.wrong or result.failed else 0,
    )


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
    max_replicas: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Maximum for autoscaling; no autoscaling by default.")
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(min=0.1, help="Processors per replica; by default those it was tuned with."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address for HTTP; 0.0.0.0 for every address of a node.")
    ] = "127.0.0.1",
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token of clients.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the token of clients, on every node.")
    ] = None,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    precision: Precision = FASTEST,
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of YAML.")] = False,
) -> Output:
    """Print the config file with which `serve run` and `serve deploy` serve bundles."""
    from ortprep.cluster.serving.config import ServeConfig
    from ortprep.cluster.serving.serve_file import has_token, is_loopback, plan_serve_file
    from ortprep.runtime.loading.model_load_options import ModelLoadOptions

    config = ServeConfig(
        device=device,
        replicas=replicas,
        max_replicas=max_replicas,
        load=ModelLoadOptions(precision=precision),
        cpus=cpus,
        token_env=token_env,
        token_file=token_file,
    )
    config.check()
    if not is_loopback(host) and not has_token(config):
        echo(
            f"warning: anyone who reaches {host} can send requests; --token-file and --token-env prevent that"
        )
    figures = _read_figures(bundles, artifacts, config)
    file = plan_serve_file(figures, config, host=host, http_port=http_port)
    return Output(file, format_yaml(file).splitlines())


def _read_figures(bundles: list[str], artifacts: Path, config: ServeConfig) -> list[BundleFigures]:
    """Returns the figures of bundles, each pinned to its version; raises `PoolError` for a repeated name."""
    from ortprep.cluster.serving.pinning import pin_version
    from ortprep.cluster.serving.serve_file import read_bundle_figures

    figures: dict[str, BundleFigures] = {}
    for bundle in bundles:
        name, pinned = pin_version(bundle if "://" in bundle else str(find_bundle(bundle, artifacts)))
        if name in figures:
            raise PoolError(f"two bundles of one name: {name}\n  expected every model once")
        figures[name] = read_bundle_figures(name, pinned, config)
    return list(figures.values())
