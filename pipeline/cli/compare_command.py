"""`ortprep compare`: the gate between two versions of a bundle, for continuous integration."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.bundle.codec import encode
from pipeline.cli.app import ARTIFACTS, Artifacts, AsJson, command
from pipeline.cli.compare_tables import (
    build_changes_table,
    build_differences_table,
    build_markdown,
    list_differences_of,
    title_of,
)
from pipeline.cli.compared import read_compared
from pipeline.cli.console import printable, say, write_json, write_line, write_table
from pipeline.cli.registry_commands import Registry
from pipeline.errors import PipelineError
from pipeline.report.regression.comparison import Comparison
from pipeline.report.regression.comparison import compare as compare_bundles
from pipeline.report.regression.limits import parse_limits

_WHICH = "a model, a bundle, a manifest.json, or NAME@VERSION in a registry."


@command
def compare(
    old: Annotated[str, typer.Argument(help=f"What there is: {_WHICH}")],
    new: Annotated[str, typer.Argument(help="What is to take its place, likewise.")],
    fail_over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="How much worse a figure may become: 10% (the default), 0.1, or init=20% for one of them; "
            "may be given several times.",
        ),
    ] = None,
    across_hardware: Annotated[
        bool, typer.Option("--across-hardware", help="Compare figures from different hardware all the same.")
    ] = False,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="NEW is from one of several machines: it may lack the others' variants."
        ),
    ] = False,
    registry: Registry = None,
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown, for a comment on the change.")
    ] = False,
) -> None:
    """Say what became worse from one version of a bundle to another, and fail if anything did."""
    limits = parse_limits(fail_over or ())
    if json and markdown:
        raise typer.BadParameter("expected one of --json and --markdown", param_hint="--markdown")
    manifests = [read_compared(text, artifacts=artifacts, registry=registry) for text in (old, new)]
    comparison = compare_bundles(*manifests, limits=limits, across_hardware=across_hardware, partial=partial)
    title = f"{old} → {new}"
    if json:
        write_json(encode(comparison))
    elif markdown:
        for line in build_markdown(comparison, title=title):
            write_line(line)
    else:
        _write_tables(comparison, title=title)
    _judge(comparison, title=title)


def _write_tables(comparison: Comparison, *, title: str) -> None:
    for variant in comparison.variants:
        name = title_of(comparison, variant)
        if variant.changes:
            write_table(build_changes_table(variant, title=f"{name}, {title}"))
        if differences := list_differences_of(variant):
            write_table(build_differences_table(differences, title=name))
    if comparison.differences:
        write_table(build_differences_table(comparison.differences, title=comparison.model))


def _judge(comparison: Comparison, *, title: str) -> None:
    """Says what there is to say.

    Raises:
        PipelineError: The new bundle may not take the old one's place.
    """
    failures = []
    for variant in comparison.variants:
        name = variant.old or variant.new
        for remark in variant.remarks:
            say(printable(f"{name}: {remark}", lines=False))
        failures += [printable(f"{name}: {failure}", lines=False) for failure in variant.failures]
    if comparison.outcome == "ok":
        return
    lines = "".join(f"\n  {failure}" for failure in failures)
    if comparison.outcome == "regression":
        raise PipelineError(f"worse than before: {title}{lines}")
    raise PipelineError(
        f"cannot be compared: {title}{lines}",
        hint="prepare both on the same machine with the same inputs, or ortprep compare … --across-hardware",
    )
