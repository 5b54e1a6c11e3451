"""The commands that show and check bundles: `show`, `check`, `report`, and the options ONNX Runtime knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.verification import check_bundle
from ortprep.children.variant_check import check_variants
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Bundle, Output, command, find_bundle
from ortprep.cli.console import Block, Prose, echo, write_line
from ortprep.cli.manifest_sources import is_in_registry, read_compared
from ortprep.cli.options_table import (
    OptionOwner,
    build_options_table,
    describe_version,
    encode_groups,
    list_options,
)
from ortprep.cli.registry_commands import Registry
from ortprep.cli.tables import (
    build_accuracy_table,
    build_variants_table,
    describe_bundle,
    describe_figures,
    describe_interface,
)
from ortprep.options import NEWEST
from ortprep.report.variant_sections import build_plans_table
from ortprep.versions import installed_onnxruntime


@command
def show(
    name: Bundle,
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
) -> Output:
    """Show a bundle: its variants, accuracy, tuning and figures."""
    folder = find_bundle(name, artifacts)
    manifest = read_manifest(folder)

    def blocks() -> Iterator[Block]:
        interface = describe_interface(read_loader_config(folder))
        yield from map(Prose, (*describe_bundle(manifest), *interface))
        yield build_variants_table(manifest)
        accuracy = build_accuracy_table(manifest)
        if accuracy.rows:
            yield accuracy
        for variant in manifest.variants:
            for one in variant.measurements:
                title = f"{manifest.name} on {variant.name}, {one.cache} cache, {one.shapes}"
                yield build_plans_table(one, title)
        yield from map(Prose, describe_figures(manifest))

    return Output(manifest, blocks())


@command
def check(
    bundle: Bundle,
    artifacts: Artifacts = ARTIFACTS,
    golden: Annotated[bool, typer.Option(help="Also load every variant that this machine can run.")] = True,
) -> None:
    """Verify every byte of a bundle, and run the golden sample on every variant."""
    folder = find_bundle(bundle, artifacts)
    check_bundle(folder)
    echo(f"{folder}: every file is as it was written")
    if golden:
        for checked in check_variants(folder):
            echo(f"{folder}: {checked}")


@command
def options(
    name: Annotated[str, typer.Argument(metavar="NAME", help="List only names that contain this text.")] = "",
    provider: Annotated[OptionOwner | None, typer.Option(help="List only these.")] = None,
    onnxruntime: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version of ONNX Runtime; by default the installed one."),
    ] = None,
    json: AsJson = False,
) -> Output:
    """List the options of ONNX Runtime: values, default, effect and first version."""
    version = onnxruntime or installed_onnxruntime() or NEWEST
    groups = list_options(version, provider, part=name)
    for remark in describe_version(version):
        echo(remark)
    if not groups:
        echo(f"no option has {name!r} in its name")
    return Output(encode_groups(version, groups), [build_options_table(group, version) for group in groups])


@command
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Models, bundles, manifests, or NAME@VERSION.",
        ),
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; by default report.html beside the bundles."),
    ] = None,
    registry: Registry = None,
) -> None:
    """Write one HTML file about bundles: charts, every trial, and the reasons."""
    from ortprep.build.receipts import REPORT_FILE, refuse_links
    from ortprep.build.report_file import write_report
    from ortprep.report.report_subjects import ReportSubject, find_manifests

    if out is None:
        refuse_links(artifacts, ())
    place = out or artifacts / REPORT_FILE
    here = [name for name in names or () if not is_in_registry(name, artifacts)]
    manifests = find_manifests(here, artifacts) if here or not names else ()
    published = [name for name in names or () if name not in here]
    others = [
        ReportSubject(manifest)
        for name in published
        for manifest in read_compared(name, artifacts=artifacts, registry=registry)
    ]
    size_bytes = write_report(manifests, place, others=others)
    write_line(str(place))
    count = len(manifests) + len(others)
    echo(f"{count} {'bundle' if count == 1 else 'bundles'}, {size_bytes / 2**20:.1f} MB")
