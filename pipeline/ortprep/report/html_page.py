"""From a report to one HTML file that needs nothing else: no network, no folder of files beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.errors import MissingExtraError
from ortprep.report.chart_specs import SPECS
from ortprep.report.content import Chart, Report
from ortprep.versions import install_command

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def render_report(report: Report, *, library: str, inputs: str = "") -> str:
    """Returns the page.

    Names, reasons and failures come from models, other programs and registries: the template engine escapes
    all of them, and the page's policy lets no script run but the two that are written here.

    Args:
        report: What it says.
        library: The script that draws charts.
        inputs: Digest of what the report was made of.

    Raises:
        MissingExtraError: The template engine is not installed.
    """
    environment = make_environment()
    from markupsafe import Markup, escape

    placed: list[Chart] = []

    def place(chart: Chart) -> int:
        placed.append(chart)
        return len(placed) - 1

    environment.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    style, script = _read("report.css"), _read("report.js")
    return environment.get_template("report.html.jinja").render(
        report=report,
        inputs=inputs,
        policy=_policy(scripts=(library, script), styles=(style,)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        licences=Markup(_read("licences.txt")),
        place=place,
        charts=lambda: Markup(format_script_json(_encode(placed))),
    )


def make_environment() -> jinja2.Environment:
    """Returns the template engine, which escapes all text.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError(
            "reports need jinja2, which is not installed", hint=install_command("report")
        ) from error
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Returns the page's Content-Security-Policy: these scripts and styles, and nothing from anywhere."""
    allowed = [" ".join(f"'sha256-{_digest(text)}'" for text in texts) for texts in (scripts, styles)]
    return (
        f"default-src 'none'; script-src {allowed[0]}; style-src {allowed[1]}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def format_script_json(data: Any) -> str:
    """Returns JSON that can stand in a script element: no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _encode(charts: Sequence[Chart]) -> Mapping[str, Any]:
    return {
        "specs": {chart.kind: SPECS[chart.kind] for chart in charts},
        "charts": [
            {"kind": chart.kind, "parameters": chart.parameters, "values": _columns(chart.values)}
            for chart in charts
        ],
    }


def _columns(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns rows without the names of their fields, which would be most of the file."""
    fields = list(dict.fromkeys(name for row in values for name in row))
    return {"fields": fields, "rows": [[row.get(name) for name in fields] for row in values]}
