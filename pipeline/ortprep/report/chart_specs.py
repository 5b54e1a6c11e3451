"""How each kind of chart is drawn: Vega-Lite specifications without data, colours and texts.

`$NAME` stands for a parameter of the chart, `@NAME` for a colour of the page's style, so that charts follow
its dark and light theme; `templates/report.js` puts both in, and makes a chart with a `step` that many pixels
high per row.
"""

from __future__ import annotations

from typing import Any

_BAR_STEP = 26


def _quantity(field: str, title: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _nominal(field: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "title": None, **more}


def _field(name: str) -> dict[str, Any]:
    return {"field": name}


def _layer(kind: str, mark: dict[str, Any] | None = None, **encoding: Any) -> dict[str, Any]:
    return {"mark": {"type": kind, **(mark or {})}, "encoding": encoding}


_ROWS = _nominal("row", sort=None, axis={"domain": False, "ticks": False, "labelPadding": 8})
_LOG = {"type": "log", "nice": False, "padding": 12}
_PHASES = {"domain": ["import", "init", "first run"], "range": ["@mark", "@c1", "@c2"]}

_WATERFALL: dict[str, Any] = {
    "step": _BAR_STEP,
    **_layer(
        "bar",
        {"height": {"band": 0.62}},
        y=_ROWS,
        x=_quantity("from", "ms since the process began to import ONNX Runtime"),
        x2=_field("to"),
        color=_nominal("phase", sort=None, scale=_PHASES),
    ),
}

_KINDS = ["trial", "front", "chosen", "default", "serves first"]
_KIND_COLOURS = {"domain": _KINDS, "range": ["@mark", "@c1", "@c2", "@c5", "@c3"]}
_KIND_SHAPES = {"domain": _KINDS, "range": ["circle", "circle", "diamond", "square", "triangle-up"]}
_FEW_TICKS = {"tickCount": 6, "format": ".3~r"}


def _label(mark: dict[str, Any]) -> dict[str, Any]:
    return {
        "transform": [{"filter": "isValid(datum.label)"}],
        **_layer(
            "text",
            {"align": "left", "dx": 12, "dy": -8, **mark},
            x=_quantity("x", "$x"),
            y=_quantity("y", "$y"),
            text={"field": "label", "type": "nominal"},
        ),
    }


_IS_CHOSEN = "datum.what === 'chosen'"

_FRONT: dict[str, Any] = {
    "height": 300,
    "layer": [
        {
            "transform": [{"filter": "isValid(datum.rank)"}],
            **_layer(
                "line",
                {"style": "front", "interpolate": "step-after"},
                x=_quantity("x", "$x", scale=_LOG),
                y=_quantity("y", "$y", scale=_LOG),
                order={"field": "rank", "type": "quantitative"},
            ),
        },
        _layer(
            "point",
            {"filled": True, "opacity": 0.9},
            x=_quantity("x", "$x", axis=_FEW_TICKS),
            y=_quantity("y", "$y", axis=_FEW_TICKS),
            size={"condition": {"test": _IS_CHOSEN, "value": 300}, "value": 75},
            stroke={"condition": {"test": _IS_CHOSEN, "value": "@text"}, "value": None},
            color=_nominal("what", sort=None, scale=_KIND_COLOURS),
            shape=_nominal("what", sort=None, scale=_KIND_SHAPES),
        ),
        # Each label twice: the first is the space around the second, which keeps it off the points behind.
        _label({"stroke": "@page", "strokeWidth": 4}),
        _label({}),
    ],
}

SPECS: dict[str, dict[str, Any]] = {
    "waterfall": _WATERFALL,
    "front": _FRONT,
}
"""Specification by kind of chart."""
