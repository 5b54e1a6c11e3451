"""A comparison of two bundles as tables for people, and as Markdown for a comment on their change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipeline.bundle.digest import PREFIX, is_digest
from pipeline.bundle.summary import Summary
from pipeline.cli.console import printable
from pipeline.cli.tables import format_summary
from pipeline.report.regression.change import Change, Verdict, format_value
from pipeline.report.regression.circumstances import Difference
from pipeline.report.regression.comparison import Comparison, VariantComparison
from pipeline.report.regression.limits import FIGURES

_VERDICTS: dict[Verdict, str] = {
    "regression": "regression",
    "improvement": "improvement",
    "noise": "within the noise",
    "same": "within the limit",
    "missing": "not known any more",
    "new": "new",
    "incomparable": "not comparable",
}
_HEADINGS = ("figure", "cache", "old", "new", "ratio", "verdict")
_WHAT_HEADINGS = ("what else changed", "old", "new")
_MOST_CHARACTERS = 90
_DIGEST_DIGITS = 12
_DASH = "–"


def build_changes_table(variant: VariantComparison, *, title: str) -> Table:
    """Returns one row per figure of a variant: medians ± half the distance between quartiles, and verdict."""
    table = Table(title=title)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in ("old", "new", "ratio") else "left")
    for change in variant.changes:
        table.add_row(*_changes_row(change))
    return table


def build_differences_table(differences: Sequence[Difference], *, title: str) -> Table:
    """Returns one row per thing that is not as it was."""
    table = Table(title=title)
    for heading in _WHAT_HEADINGS:
        table.add_column(heading)
    for difference in differences:
        table.add_row(*_differences_row(difference))
    return table


def title_of(comparison: Comparison, variant: VariantComparison) -> str:
    """Returns what a variant is called above its table."""
    return f"{comparison.model} on {variant.new or variant.old or ''}"


def list_differences_of(variant: VariantComparison) -> tuple[Difference, ...]:
    """Returns what else changed for a variant, its hardware first."""
    return (*variant.hardware, *variant.differences)


def build_markdown(comparison: Comparison, *, title: str) -> Iterator[str]:
    """Yields the lines of a comparison in GitHub's Markdown.

    What others wrote into a manifest is in code spans, where it is neither markup nor a mention of anybody.
    """
    yield f"### {_code(title)}: {comparison.outcome}"
    yield from _markdown_table(_WHAT_HEADINGS, map(_differences_row, comparison.differences))
    for variant in comparison.variants:
        yield ""
        yield f"#### {_code(title_of(comparison, variant))}: {variant.outcome}"
        lines = (*variant.failures, *variant.remarks)
        yield from ("", *(f"- {_code(line)}" for line in lines)) if lines else ()
        yield from _markdown_table(_HEADINGS, map(_changes_row, variant.changes))
        yield from _markdown_table(_WHAT_HEADINGS, map(_differences_row, list_differences_of(variant)))


def _markdown_table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    # In a table alone: elsewhere the backslash would be seen.
    escaped = str.maketrans({"|": "\\|"})
    found = [" | ".join(_code(cell).translate(escaped) if cell else "" for cell in row) for row in rows]
    if not found:
        return
    yield ""
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    yield from (f"| {row} |" for row in found)


def _code(text: str) -> str:
    return f"`{printable(text, lines=False).replace('`', chr(39))}`"


def _changes_row(change: Change) -> tuple[str, ...]:
    unit = FIGURES[change.figure]
    return (
        f"{change.figure} {unit}",
        change.cache,
        _format(change.old, is_exact=not change.cache),
        _format(change.new, is_exact=not change.cache),
        _DASH if change.ratio is None else f"{change.ratio:.2f}×",
        _VERDICTS[change.verdict],
    )


def _format(summary: Summary | None, *, is_exact: bool) -> str:
    if summary is None or not is_exact:
        return format_summary(summary)
    return format_value(summary.median)


def _differences_row(difference: Difference) -> tuple[str, ...]:
    return tuple(_shorten(text) for text in (difference.what, difference.old, difference.new))


def _shorten(text: str) -> str:
    shown = printable(text, lines=False) or _DASH
    if is_digest(shown):
        return shown.removeprefix(PREFIX)[:_DIGEST_DIGITS]
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 1]}…"
