"""The commands of a build: `prepare`, here or on a cluster, `explain` and `tune`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ortprep.cli.command import (
    ARTIFACTS,
    CONFIGS,
    Artifacts,
    AsJson,
    Configs,
    Names,
    Output,
    SkipUnavailable,
    Target,
    command,
    exit_code_of,
)
from ortprep.cli.console import Block, Prose, write_json
from ortprep.cli.init_command import names_of_specs
from ortprep.cli.progress import BuildObserver
from ortprep.errors import SpecError
from ortprep.tables import count_of

STORE_VARIABLE = "ORTPREP_STORE"


class EngineName(StrEnum):
    """Where the stages run: on this machine or on a cluster."""

    LOCAL = "local"
    RAY = "ray"


_RAY = "With --engine ray"


NamesOrFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        help="Models, or ONNX files, which get a spec first if they have none; all models by default.",
    ),
]
PrepareTarget = Annotated[
    str | None,
    typer.Option(metavar="T", help="Build only this target: cpu, cuda, or a kind of hardware of the fleet."),
]
ChosenEngine = Annotated[EngineName, typer.Option(help="local: on this machine; ray: on a cluster.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help=f"{_RAY}: the cluster; by default $RAY_ADDRESS, else this machine's."
    ),
]
Fleet = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help=f"{_RAY}: the kinds of hardware; by default fleet.yaml beside the specs."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"{_RAY}: where nodes store their work, a path or s3://…, gs://…; by default ${STORE_VARIABLE}.",
    ),
]
Registry = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help=f"{_RAY}: where nodes publish; by default the folder registry in the store."
    ),
]
Collect = Annotated[
    bool | None,
    typer.Option(
        "--collect/--no-collect",
        help=f"{_RAY}: pull the merged bundles from the registry at the end, or leave them there.",
    ),
]
NodeTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0,
        help=f"{_RAY}: seconds to wait for another node when the last of a kind is lost (600).",
    ),
]


@command
def prepare(
    names: NamesOrFiles = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: PrepareTarget = None,
    skip_unavailable: SkipUnavailable = False,
    engine: ChosenEngine = EngineName.LOCAL,
    address: Address = None,
    fleet: Fleet = None,
    store: Store = None,
    registry: Registry = None,
    collect: Collect = None,
    node_timeout: NodeTimeout = None,
) -> None:
    """Build the bundles that are not up to date, as `doit prepare` does; ONNX files get a spec first."""
    from ortprep.build.runner import BuildRequest, build_here

    of_ray = {
        "--address": address,
        "--fleet": fleet,
        "--store": store,
        "--registry": registry,
        "--collect": collect,
        "--node-timeout": node_timeout,
    }
    if engine is EngineName.LOCAL:
        _refuse([name for name, value in of_ray.items() if value is not None], EngineName.RAY)
        build = build_here
    else:
        from ortprep.cluster.building.engine import NODE_TIMEOUT_S, RayEngine

        build = RayEngine(
            store=_find_store(store),
            registry=registry,
            address=address,
            fleet=fleet,
            node_timeout_s=NODE_TIMEOUT_S if node_timeout is None else node_timeout,
            collect=collect is not False,
        ).prepare
    request = BuildRequest(
        configs=configs,
        artifacts=artifacts,
        names=names_of_specs(names or (), configs),
        only=target,
        skip_unavailable=skip_unavailable,
    )
    if errors := build(request, BuildObserver()):
        raise typer.Exit(exit_code_of(errors))


def _refuse(stray: Sequence[str], engine: EngineName) -> None:
    if stray:
        raise SpecError(
            f"option of another engine: {', '.join(stray)}\n  expected it only with --engine {engine}",
            hint="ortprep prepare --help",
        )


def _find_store(store: str | None) -> str:
    url = store or os.environ.get(STORE_VARIABLE)
    if not url:
        raise SpecError(
            f"no store named\n  expected --store or ${STORE_VARIABLE}, got neither",
            hint="ortprep prepare --engine ray --store URL   (a path all nodes see, s3://bucket/folder, …)",
        )
    return url


@command
def node_labels(json: AsJson = False) -> Output:
    """Print this machine's hardware as Ray node labels: `ray start --labels "$(ortprep node-labels)"`."""
    from ortprep.cluster.nodes import describe_hardware
    from ortprep.runtime.machine.hardware import read_hardware

    labels = describe_hardware(read_hardware())
    return Output(labels, [",".join(f"{key}={value}" for key, value in labels.items())])


@command
def explain(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    skip_unavailable: SkipUnavailable = False,
    json: AsJson = False,
) -> Output:
    """Say what `prepare` would do, and why."""
    from ortprep.build.build_plan import plan_builds
    from ortprep.build.queries import explain_tasks, format_explanations
    from ortprep.bundle.digest import DigestCache

    builds = plan_builds(
        configs, artifacts, names=names or (), only=target, skip_unavailable=skip_unavailable
    )
    explanations = [item for tasks in builds for item in explain_tasks(tasks, cache=DigestCache())]
    data = [{"model": e.model, "task": str(e.task), "reasons": e.reasons} for e in explanations]
    return Output(data, format_explanations(explanations))


@command
def tune(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    skip_unavailable: SkipUnavailable = False,
    json: AsJson = False,
) -> Output:
    """Search for the best way to store, load and run models, and show every trial."""
    from ortprep.build.build_plan import plan_builds
    from ortprep.build.queries import read_searches, tune_tasks
    from ortprep.build.runner import run_builds, with_requirements
    from ortprep.cli.tables import describe_search
    from ortprep.report.trials import build_trials_table

    builds = plan_builds(
        configs, artifacts, names=names or (), only=target, skip_unavailable=skip_unavailable
    )
    tasks = tune_tasks(builds, named=bool(names))
    needed = [
        with_requirements(build, [task for task in tasks if task.model == build[0].model]) for build in builds
    ]
    errors = run_builds(needed, BuildObserver())
    if errors:
        raise typer.Exit(exit_code_of(errors))
    searches = read_searches(tasks)

    def blocks() -> Iterator[Block]:
        for name, record in searches.items():
            cost = f"cost at {count_of(record.runs_per_load, 'run')} per load"
            yield build_trials_table(record, f"{name}, {cost}, relative to default ONNX Runtime")
            yield from map(Prose, describe_search(record))

    return Output(searches, blocks())


@command
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from ortprep.spec.models import spec_schema

    write_json(spec_schema())
