"""A bundle in a notebook: what the report says first, as HTML without scripts, files or network."""

from __future__ import annotations

import re
from dataclasses import replace

from ortprep.bundle.manifest import Manifest
from ortprep.report.content import Chart, ReportSection, ReportTable
from ortprep.report.formatting import ABSENT
from ortprep.report.html_page import TEMPLATES, make_environment
from ortprep.report.measurement_sections import build_measurement_sections
from ortprep.report.speedup import build_gain_facts, describe_gain, find_gain, headline_variant
from ortprep.report.vega import draw_chart

_TEMPLATE = "summary.html.jinja"


def render_summary(manifest: Manifest) -> str:
    """Returns a bundle's headline, figures and the phases of its start, as a fragment of HTML.

    Raises:
        MissingExtraError: The packages of the extra `report` are not installed.
    """
    environment = make_environment()
    from markupsafe import Markup

    variant = headline_variant(manifest)
    gain = None if variant is None else find_gain(variant)
    section = None if variant is None else next(build_measurement_sections(variant), None)
    return environment.get_template(_TEMPLATE).render(
        manifest=manifest,
        variant=variant,
        headline=describe_gain(gain),
        facts=build_gain_facts(gain),
        tables=() if section is None else tuple(map(_without_empty_columns, section.tables)),
        chart=_first_chart(section),
        draw=lambda chart: Markup(draw_chart(chart, colours=_read_colours())),
    )


def _first_chart(section: ReportSection | None) -> Chart | None:
    return section.charts[0] if section is not None and section.charts else None


def _without_empty_columns(table: ReportTable) -> ReportTable:
    """Returns a table without columns of dashes, which leaves its rows the width of a notebook."""
    filled = [
        index
        for index in range(len(table.columns))
        if any(row[index].text not in ("", ABSENT) for row in table.rows)
    ]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in filled),
        rows=tuple(tuple(row[index] for index in filled) for row in table.rows),
    )


def _read_colours() -> dict[str, str]:
    """Returns the colours of the report's light theme, by name."""
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    light = style.partition("@media")[0]
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", light))
