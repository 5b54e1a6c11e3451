"""A report as one HTML file that needs nothing else, and what a notebook shows of a bundle."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.children.child import run_child
from ortprep.errors import MissingExtraError
from ortprep.quoting import printable
from ortprep.report.content import Chart, Report
from ortprep.versions import install_command

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
_EXPOSE = "window.vegaEmbed = vegaEmbed;"
_TIMEOUT_S = 120.0


def render_report(report: Report, *, library: str) -> str:
    """Returns the page.

    Names, reasons and failures come from models, other programs and registries: the template engine escapes
    all of them, and the page's policy lets no script run but the two that are written here.

    Args:
        report: Content of the page.
        library: The script that draws charts.

    Raises:
        MissingExtraError: The template engine is not installed.
    """
    environment = make_environment()
    from markupsafe import Markup

    placed: list[Chart] = []

    def place(chart: Chart) -> int:
        placed.append(chart)
        return len(placed) - 1

    style, script = _read("report.css"), _read("report.js")
    return environment.get_template("report.html.jinja").render(
        report=report,
        policy=_policy(scripts=(library, script), styles=(style,)),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        licences=Markup(_read("licences.txt")),
        place=place,
        charts=lambda: Markup(format_script_json(_encode(placed))),
    )


def read_vega() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script, as vl-convert-python ships them.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    # By a child: the engine that makes it would stay in memory.
    return run_child(bundle_vega, _EXPOSE, timeout_s=_TIMEOUT_S).value


def bundle_vega(script: str) -> str:
    """Returns the library that draws charts, with a script that uses it, in a child process.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "charts need vl-convert-python, which is not installed", hint=install_command("report")
        ) from error
    library: str = vl_convert.javascript_bundle(script)
    # A script element ends at the first `</script`, wherever in a text that is.
    return library.replace("</script", "<\\/script").replace("<!--", "<\\!--")


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
    from markupsafe import Markup, escape

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    line_break = Markup("_<wbr>")
    environment.filters["breakable"] = lambda text: escape(printable(text)).replace("_", line_break)
    return environment


def read_specification(kind: str) -> dict[str, Any]:
    """Returns how a kind of chart is drawn: a Vega-Lite specification without data, colours and texts.

    `$NAME` stands for a parameter of the chart, `@NAME` for a colour of the page's style, so that charts
    follow its dark and light theme; `templates/report.js` puts both in, and makes a chart with a `step` that
    many pixels high per row.
    """
    specification: dict[str, Any] = json.loads(_read(f"{kind}.vl.json"))
    return specification


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
        "specs": {chart.kind: read_specification(chart.kind) for chart in charts},
        "charts": [
            {"kind": chart.kind, "parameters": chart.parameters, "values": _columns(chart.values)}
            for chart in charts
        ],
    }


def _columns(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns rows without the names of their fields, which would be most of the file."""
    fields = list(dict.fromkeys(name for row in values for name in row))
    return {"fields": fields, "rows": [[row.get(name) for name in fields] for row in values]}
