"""`prepare`, on this machine or on a cluster, and what the nodes of a cluster say of themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.app import (
    ARTIFACTS,
    CONFIGS,
    Artifacts,
    AsJson,
    Configs,
    Names,
    SkipUnavailable,
    command,
    exit_code_of,
)
from pipeline.cli.console import BuildObserver, write_json, write_line
from pipeline.errors import SpecError
from pipeline.graph.engine import Engine, Order

STORE_VARIABLE = "ORTPREP_STORE"


class EngineName(StrEnum):
    """What runs the stages."""

    DOIT = "doit"
    RAY = "ray"


_RAY = "With --engine ray"


@command
def prepare(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Build this target alone: cpu, cuda, or a kind of hardware in the fleet."
        ),
    ] = None,
    skip_unavailable: SkipUnavailable = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-n", min=1, help="Tasks that may run at once on this machine.")
    ] = 1,
    engine: Annotated[
        EngineName, typer.Option(help="doit on this machine, or ray on a cluster.")
    ] = EngineName.DOIT,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help=f"{_RAY}: the cluster; else $RAY_ADDRESS, else this machine's."
        ),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"{_RAY}: kinds of hardware; else fleet.yaml beside the specs."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"{_RAY}: where nodes keep their work, a path or an fsspec URL; else ${STORE_VARIABLE}.",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help=f"{_RAY}: where they publish; else the folder registry in the store."
        ),
    ] = None,
    collect: Annotated[
        bool | None,
        typer.Option(
            "--collect/--no-collect",
            help=f"{_RAY}: fetch the merged bundles from the registry in the end, or leave them there.",
        ),
    ] = None,
    node_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help=f"{_RAY}: seconds to wait for a node once a kind's last is gone (600).",
        ),
    ] = None,
) -> None:
    """Build bundles: everything that is not up to date (the same as `doit prepare`)."""
    of_ray = {
        "--address": address,
        "--fleet": fleet,
        "--store": store,
        "--registry": registry,
        "--collect": collect,
        "--node-timeout": node_timeout,
    }
    chosen: Engine
    if engine is EngineName.DOIT:
        _refuse([name for name, value in of_ray.items() if value is not None], EngineName.RAY)
        from pipeline.graph.doit_engine import DoitEngine

        chosen = DoitEngine()
    else:
        _refuse(["--jobs"] if jobs > 1 else [], EngineName.DOIT)
        from pipeline.cluster.building.engine import NODE_TIMEOUT_S, RayEngine

        chosen = RayEngine(
            store=_find_store(store),
            registry=registry,
            address=address,
            fleet=fleet,
            node_timeout_s=NODE_TIMEOUT_S if node_timeout is None else node_timeout,
            collect=collect is not False,
        )
    order = Order(
        configs=configs,
        artifacts=artifacts,
        names=tuple(names or ()),
        only=target,
        skip_unavailable=skip_unavailable,
        jobs=jobs,
    )
    outcome = chosen.prepare(order, BuildObserver())
    if not outcome.done:
        raise typer.Exit(exit_code_of(outcome.errors))


def _refuse(stray: Sequence[str], engine: EngineName) -> None:
    if stray:
        raise SpecError(
            f"an option of another engine: {', '.join(stray)}\n  expected it with --engine {engine}",
            hint="ortprep prepare --help",
        )


def _find_store(store: str | None) -> str:
    found = store or os.environ.get(STORE_VARIABLE)
    if not found:
        raise SpecError(
            f"no store named\n  expected one by --store or in ${STORE_VARIABLE}, got nothing",
            hint="ortprep prepare --engine ray --store URL   (a path all nodes see, s3://bucket/folder, …)",
        )
    return found


@command
def node_labels(json: AsJson = False) -> None:
    """Print what this machine is as labels of a Ray node: `ray start --labels "$(ortprep node-labels)"`."""
    from pipeline.cluster.building.labels import describe_hardware
    from pipeline.runtime.hardware import read_hardware

    labels = describe_hardware(read_hardware())
    if json:
        write_json(labels)
    else:
        write_line(",".join(f"{key}={value}" for key, value in labels.items()))
