"""`ortprep compare`: the gate between two versions of a bundle, for continuous integration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from ortprep.bundle.digest import PREFIX, is_digest
from ortprep.bundle.figures import Samples
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Output, command
from ortprep.cli.console import Block, Talk
from ortprep.cli.manifest_sources import read_compared
from ortprep.cli.registry_commands import Registry
from ortprep.cli.tables import LEGEND
from ortprep.errors import PipelineError
from ortprep.measuring.change import FIGURES, Change, Verdict, format_value, parse_limits
from ortprep.measuring.regression import Comparison, Difference
from ortprep.measuring.regression import compare as compare_bundles
from ortprep.quoting import printable
from ortprep.tables import CellValue, Table, fill_table, number_cell

_VERDICTS: dict[Verdict, str] = {
    "regression": "regression",
    "improvement": "improvement",
    "noise": "within the noise",
    "same": "within the limit",
    "missing": "missing",
    "new": "new",
    "incomparable": "not comparable",
}
_MAX_CHARACTERS = 90
_DIGEST_DIGITS = 12
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
    across_hardware: Annotated[
        bool, typer.Option("--across-hardware", help="Compare figures from different hardware anyway.")
    ] = False,
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
        return Output(Comparison(after[0].name, "ok", (), ()), [nothing])
    comparison = compare_bundles(
        before, after, limits=limits, across_hardware=across_hardware, partial=partial
    )
    title = f"{old} → {new}"
    return Output(comparison, _blocks(comparison, title=title), _judge(comparison, title=title))


def _blocks(comparison: Comparison, *, title: str) -> Iterator[Block]:
    """Yields what changed of every variant, what else did, and what there is to remark."""
    for variant in comparison.variants:
        name = f"{comparison.model} on {variant.new or variant.old or ''}"
        if variant.changes:
            yield _build_changes_table(variant.changes, title=f"{name}, {title}")
        yield from _difference_tables((*variant.hardware, *variant.differences), title=name)
    if any(variant.changes for variant in comparison.variants):
        yield LEGEND
    yield from _difference_tables(comparison.differences, title=comparison.model)
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
            ("verdict", lambda change: _VERDICTS[change.verdict]),
        ),
    )


def _difference_tables(differences: Sequence[Difference], *, title: str) -> Iterator[Table]:
    columns = (
        ("what else changed", lambda one: _shorten(one.what)),
        ("old", lambda one: _shorten(one.old)),
        ("new", lambda one: _shorten(one.new)),
    )
    if differences:
        yield fill_table(title, differences, columns)


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
        hint="prepare both on the same machine with the same inputs, or ortprep compare … --across-hardware",
    )


def _shorten(text: str) -> str:
    line = printable(text, lines=False)
    if is_digest(line):
        return line.removeprefix(PREFIX)[:_DIGEST_DIGITS]
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"
