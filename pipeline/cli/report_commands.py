"""The command that tells of bundles in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.app import ARTIFACTS, Artifacts, command
from pipeline.cli.compared import read_compared
from pipeline.cli.console import say, write_line
from pipeline.cli.registry_commands import Registry


@command
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Models, bundles, manifests, NAME@VERSION: several of one model are its versions.",
        ),
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where it goes; else report.html among the bundles.")
    ] = None,
    registry: Registry = None,
) -> None:
    """Write what bundles are and achieve as one HTML file: charts, every trial, reasons."""
    from pipeline.graph.reporting import REPORT_FILE, write_report
    from pipeline.report.reading import find_manifests
    from pipeline.report.subject import Subject

    place = out or artifacts / REPORT_FILE
    here = [name for name in names or () if not _is_published(name, artifacts)]
    manifests = find_manifests(here, artifacts) if here or not names else ()
    published = [name for name in names or () if name not in here]
    others = [Subject(read_compared(name, artifacts=artifacts, registry=registry)) for name in published]
    size_bytes = write_report(manifests, place, others=others)
    write_line(str(place))
    count = len(manifests) + len(others)
    say(f"{count} {'bundle' if count == 1 else 'bundles'}, {size_bytes / 2**20:.1f} MB")


def _is_published(name: str, artifacts: Path) -> bool:
    """Says whether a name is of a version in a registry; what lies on this machine goes first."""
    if "://" in name:
        return True
    return "@" in name and "/" not in name and not Path(name).exists() and not (artifacts / name).exists()
