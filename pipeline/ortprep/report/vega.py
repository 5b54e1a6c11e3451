"""What vl-convert-python does in child processes: the charts' JavaScript, and SVG without scripts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from ortprep.children.child import run_child
from ortprep.errors import MissingExtraError
from ortprep.report.chart_specs import SPECS
from ortprep.report.content import Chart
from ortprep.versions import install_command

_TIMEOUT_S = 120
_WIDTH = 560


def read_vega() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script, as vl-convert-python ships them."""
    # By a child: the engine that makes it would stay in memory.
    return str(run_child(bundle_vega, {}, timeout_s=_TIMEOUT_S).value["script"])


def bundle_vega(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Child function: returns the library as one script.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    script = _import_vl_convert().javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # A script element ends at the first `</script`, wherever in a text that is.
    return {"script": script.replace("</script", "<\\/script").replace("<!--", "<\\!--")}


def _import_vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "charts need vl-convert-python, which is not installed", hint=install_command("report")
        ) from error
    return vl_convert


def draw_chart(chart: Chart, *, colours: Mapping[str, str]) -> str:
    """Returns a chart as an SVG element.

    Args:
        chart: The chart.
        colours: What replaces `@NAME` in its specification.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    filled = _fill(SPECS[chart.kind], chart.parameters, colours)
    step = filled.pop("step", None)
    rows = {row.get("row") for row in chart.values}
    spec = {
        **filled,
        **({} if step is None else {"height": step * len(rows)}),
        "width": _WIDTH,
        "data": {"values": list(chart.values)},
        "background": colours.get("surface"),
        "config": {"view": {"stroke": None}, "legend": {"orient": "top", "title": None}},
    }
    return _draw(json.dumps(spec))


@functools.lru_cache(maxsize=64)
def _draw(spec: str) -> str:
    # By a child: the engine that draws would stay in memory.
    return str(run_child(convert_to_svg, {"spec": spec}, timeout_s=_TIMEOUT_S).value["svg"])


def convert_to_svg(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: returns a specification of Vega-Lite as SVG.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    vl_convert = _import_vl_convert()
    return {"svg": vl_convert.vegalite_to_svg(request["spec"], allowed_base_urls=[])}


def _fill(part: Any, parameters: Mapping[str, Any], colours: Mapping[str, str]) -> Any:
    """Puts the parameters of a chart and the colours into a specification, as `templates/report.js` does."""
    if isinstance(part, str):
        if part.startswith("$"):
            return parameters[part[1:]]
        return colours[part[1:]] if part.startswith("@") else part
    if isinstance(part, list):
        return [_fill(item, parameters, colours) for item in part]
    if isinstance(part, dict):
        return {key: _fill(item, parameters, colours) for key, item in part.items()}
    return part
