"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.quoting import printable
from ortprep.report.content import Report

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def render_report(report: Report) -> str:
    """Returns the page.

    Names, reasons and failures come from models, other programs and registries: the template engine escapes
    all of them, and the page's policy lets no script run but its own.

    Args:
        report: Content of the page.
    """
    environment = make_environment()
    from markupsafe import Markup

    style, script = _read("report.css"), _read("report.js")
    return environment.get_template("report.html.jinja").render(
        report=report,
        policy=_policy(script, style),
        style=Markup(style),
        script=Markup(script),
    )


def make_environment() -> jinja2.Environment:
    """Returns the template engine, which escapes all text."""
    import jinja2
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


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Returns the page's Content-Security-Policy: this script and style, and nothing from anywhere."""
    return (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
