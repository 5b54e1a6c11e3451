"""The commands that show, check and compare bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest, read_manifest_file
from ortprep.bundle.verification import check_bundle
from ortprep.children.variant_check import TIMEOUT_S, check_variants
from ortprep.cli.command import (
    ARTIFACTS,
    Artifacts,
    AsJson,
    Bundle,
    Output,
    command,
    find_bundle,
    names_version,
)
from ortprep.cli.console import Block, Talk, echo
from ortprep.cli.registry_commands import Registry
from ortprep.cli.tables import (
    LEGEND,
    build_accuracy_table,
    build_plans_table,
    build_trials_table,
    build_variants_table,
    describe_bundle,
    describe_figures,
    describe_interface,
)
from ortprep.errors import PipelineError
from ortprep.measuring.change import FIGURES, Change, format_value, parse_limits
from ortprep.measuring.regression import Comparison
from ortprep.measuring.regression import compare as compare_bundles
from ortprep.measuring.shipped import describe_cache
from ortprep.quoting import printable
from ortprep.spec.urls import redact_url
from ortprep.tables import CellValue, Table, count_of, fill_table, number_cell


@command
def show(
    name: Bundle,
    artifacts: Artifacts = ARTIFACTS,
    everything: Annotated[bool, typer.Option("--all", help="Also show every trial of the search.")] = False,
    json: AsJson = False,
) -> Output:
    """Show a bundle: its variants, accuracy, tuning and figures."""
    folder = find_bundle(name, artifacts)
    manifest = read_manifest(folder)

    def blocks() -> Iterator[Block]:
        interface = describe_interface(read_loader_config(folder))
        yield from (*describe_bundle(manifest), *interface)
        yield build_variants_table(manifest)
        accuracy = build_accuracy_table(manifest)
        if accuracy.rows:
            yield accuracy
        shown: list[PlanFigures] = []
        for variant in manifest.variants:
            for one in variant.measurements:
                if all(plan in shown for plan in one.plans):  # the portable variant's, too
                    continue
                title = f"{manifest.name} on {variant.name}, {describe_cache(one)}, {one.shapes}"
                yield build_plans_table(one, title)
                shown += one.plans
        for variant in manifest.variants if everything else ():
            if variant.tuning is not None:
                runs = count_of(variant.tuning.runs_per_load, "run")
                title = f"every trial, cheapest first at {runs} per load, relative to the default"
                yield build_trials_table(variant.tuning, f"{manifest.name} on {variant.name}: {title}")
        yield from describe_figures(manifest)

    return Output(manifest, blocks())


@command
def check(
    bundle: Bundle,
    artifacts: Artifacts = ARTIFACTS,
    golden: Annotated[bool, typer.Option(help="Also load every variant that this machine can run.")] = True,
    timeout: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds for each variant.")] = TIMEOUT_S,
) -> None:
    """Verify every byte of a bundle, and run the golden sample on every variant."""
    folder = find_bundle(bundle, artifacts)
    check_bundle(folder)
    echo(f"{folder}: every file is as it was written")
    if golden:
        for checked in check_variants(folder, timeout_s=timeout):
            answered = f"variant {checked.name} answers the golden sample as recorded"
            echo(f"{folder}: {f'passed over {checked}' if checked.reasons else answered}")


_WHICH = "a model, a bundle, a manifest.json, or NAME@VERSION in a registry."


@command
def compare(
    old: Annotated[str, typer.Argument(metavar="OLD", help=f"The current version: {_WHICH}")],
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="The version to compare with it, in the same forms.")
    ],
    fail_over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="How much worse a figure may become: 10% (the default), 0.1, or init=20% for one figure; "
            "may be repeated.",
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="NEW is from one of several machines: it may lack the others' variants."
        ),
    ] = False,
    if_published: Annotated[
        bool,
        typer.Option(
            "--if-published", help="Pass if the registry has no version OLD yet, as before the first release."
        ),
    ] = False,
    registry: Registry = None,
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
) -> Output:
    """Compare two versions of a bundle, and fail if anything became worse."""
    limits = parse_limits(fail_over or ())
    before = read_compared(old, artifacts=artifacts, registry=registry, if_published=if_published)
    after = read_compared(new, artifacts=artifacts, registry=registry)
    if not before:
        nothing = Talk(printable(f"nothing to compare with: {old} is not published yet", lines=False))
        return Output(Comparison(after[0].name, "ok", ()), [nothing])
    comparison = compare_bundles(before, after, limits=limits, partial=partial)
    title = f"{old} → {new}"
    return Output(comparison, _blocks(comparison, title=title), _judge(comparison, title=title))


def _blocks(comparison: Comparison, *, title: str) -> Iterator[Block]:
    """Yields what changed of every variant, and what there is to remark."""
    for variant in comparison.variants:
        if variant.changes:
            name = f"{comparison.model} on {variant.new or variant.old or ''}"
            yield _build_changes_table(variant.changes, title=f"{name}, {title}")
    if any(variant.changes for variant in comparison.variants):
        yield LEGEND
    for variant in comparison.variants:
        for remark in variant.remarks:
            yield Talk(printable(f"{variant.old or variant.new}: {remark}", lines=False))


def _build_changes_table(changes: Sequence[Change], *, title: str) -> Table:
    """Returns one row per figure of a variant."""

    def figure(summary: Samples | None, change: Change) -> CellValue:
        if summary is None or change.cache:
            return summary
        return number_cell(summary.median, format_value(summary.median))  # exact: it has no spread

    return fill_table(
        title,
        changes,
        (
            ("figure", lambda change: f"{change.figure} {FIGURES[change.figure]}"),
            ("cache", lambda change: change.cache),
            ("old", lambda change: figure(change.old, change)),
            ("new", lambda change: figure(change.new, change)),
            ("ratio", lambda change: change.ratio and number_cell(change.ratio, f"{change.ratio:.2f}×")),
            ("verdict", lambda change: change.verdict),
        ),
    )


def _judge(comparison: Comparison, *, title: str) -> PipelineError | None:
    """Returns why the new bundle may not take the old one's place; None if it may."""
    if comparison.outcome == "ok":
        return None
    lines = "".join(
        "\n  " + printable(f"{variant.old or variant.new}: {failure}", lines=False)
        for variant in comparison.variants
        for failure in variant.failures
    )
    if comparison.outcome == "regression":
        return PipelineError(f"worse than before: {title}{lines}")
    return PipelineError(
        f"cannot be compared: {title}{lines}",
        hint="prepare both on the same kind of machine, with the same inputs",
    )


def read_compared(
    text: str, *, artifacts: Path, registry: str | None, if_published: bool = False
) -> tuple[Manifest, ...]:
    """Returns the manifests that a user names: one, or one per machine that prepared a published version.

    Args:
        text: A model below `artifacts`, a bundle's folder, a manifest's file, `NAME@VERSION` or
            `registry://NAME@VERSION` in a registry, or `REGISTRY/NAME@VERSION` with the registry's URL. What
            lies on this machine goes first.
        artifacts: Folder of bundles.
        registry: URL of the registry, None for what `$ORTPREP_REGISTRY` names.
        if_published: Whether a registry that was read, and has no version of that name, gives no manifests.

    Raises:
        BundleError: There is nothing of that name, or nothing that can be read.
        IntegrityError: It was changed after it was written.
        NotPublishedError: The registry has no such version.
        RegistryError: The registry failed, or none was named.
    """
    is_here = Path(text).exists() or (artifacts / text).exists()
    if "://" in text or (names_version(text) and not is_here):
        return _read_version(text if "://" in text else f"registry://{text}", registry, if_published)
    path = Path(text)
    return (read_manifest_file(path if path.is_file() else find_bundle(text, artifacts) / MANIFEST_FILE),)


def _read_version(location: str, registry: str | None, if_published: bool) -> tuple[Manifest, ...]:
    """Returns the manifests of a version's parts; the models stay where they are."""
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.references import split_location
    from ortprep.registry.versions import is_published, resolve

    url, reference = split_location(location, registry=registry)
    with open_catalogue(url) as catalogue:
        state = catalogue.read_state(reference.name)
        if if_published and not is_published(state, reference.version):
            return ()
        version = resolve(state, reference.version, registry=redact_url(url))
        return tuple(manifest for _, manifest in catalogue.read_manifests(catalogue.read_parts(version)))
