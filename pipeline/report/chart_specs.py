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


def _told() -> dict[str, Any]:
    """Returns the tooltip: a text that was made with the data."""
    return {"field": "told", "type": "nominal"}


_ROWS = _nominal("row", sort=None, axis={"domain": False, "ticks": False, "labelPadding": 8})
_LOG = {"type": "log", "nice": False, "padding": 12}

_PHASES = {"domain": ["import", "init", "first run"], "range": ["@mark", "@c1", "@c2"]}

_WATERFALL: dict[str, Any] = {
    "step": _BAR_STEP,
    "mark": {"type": "bar", "height": {"band": 0.62}},
    "encoding": {
        "y": _ROWS,
        "x": _quantity("from", "ms since the process began to import ONNX Runtime"),
        "x2": {"field": "to"},
        "color": _nominal("phase", sort=None, scale=_PHASES),
        "tooltip": _told(),
    },
}

_SPREAD: dict[str, Any] = {
    "step": _BAR_STEP,
    "encoding": {"y": _ROWS, "tooltip": _told()},
    "layer": [
        {
            "mark": {"type": "bar", "style": "faint", "height": {"band": 0.5}},
            "encoding": {"x": _quantity("median", "$unit")},
        },
        {
            "mark": {"type": "rule", "style": "whisker"},
            "encoding": {"x": _quantity("low", "$unit"), "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "rule", "style": "box"},
            "encoding": {"x": _quantity("p25", "$unit"), "x2": {"field": "p75"}},
        },
        {"mark": {"type": "tick", "style": "median"}, "encoding": {"x": _quantity("median", "$unit")}},
    ],
}

_GAINS: dict[str, Any] = {
    "step": 22,
    "encoding": {"y": _ROWS, "tooltip": _told()},
    "layer": [
        {
            "data": {"values": [{"one": 1}]},
            "mark": {"type": "rule", "style": "limit"},
            "encoding": {"x": _quantity("one", "$unit"), "y": None, "tooltip": None},
        },
        {
            "mark": {"type": "rule", "style": "whisker"},
            "encoding": {"x": _quantity("low", "$unit", scale=_LOG), "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {
                "x": _quantity(
                    "value",
                    "$unit",
                    scale=_LOG,
                    axis={"labelExpr": "format(datum.value, '~g') + '×'", "tickCount": 6},
                ),
                "color": _nominal(
                    "sure", sort=None, scale={"domain": "$sure", "range": ["@c3", "@c2", "@mark", "@mark"]}
                ),
                "shape": _nominal("sure", sort=None, scale={"domain": "$sure"}),
            },
        },
    ],
}

_KINDS = ["trial", "front", "chosen", "default", "serves first"]
_KIND_COLOURS = {"domain": _KINDS, "range": ["@mark", "@c1", "@c2", "@c5", "@c3"]}
_KIND_SHAPES = {"domain": _KINDS, "range": ["circle", "circle", "diamond", "square", "triangle-up"]}

_FRONT: dict[str, Any] = {
    "height": 300,
    "layer": [
        {
            "transform": [{"filter": "isValid(datum.rank)"}],
            "mark": {"type": "line", "style": "front", "interpolate": "step-after"},
            "encoding": {
                "x": _quantity("x", "$x", scale=_LOG),
                "y": _quantity("y", "$y", scale=_LOG),
                "order": {"field": "rank", "type": "quantitative"},
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 75, "opacity": 0.9},
            "encoding": {
                "x": _quantity("x", "$x", axis={"tickCount": 6, "format": ".3~r"}),
                "y": _quantity("y", "$y", axis={"tickCount": 6, "format": ".3~r"}),
                "color": _nominal("what", sort=None, scale=_KIND_COLOURS),
                "shape": _nominal("what", sort=None, scale=_KIND_SHAPES),
                "tooltip": _told(),
            },
        },
        {
            "transform": [{"filter": "isValid(datum.label)"}],
            "mark": {"type": "text", "align": "left", "dx": 8, "dy": -6},
            "encoding": {
                "x": _quantity("x", "$x"),
                "y": _quantity("y", "$y"),
                "text": {"field": "label", "type": "nominal"},
            },
        },
    ],
}

_DECADES = {"values": [10**power for power in range(7)], "format": "~s"}

_COSTS: dict[str, Any] = {
    "height": 200,
    "mark": "line",
    "encoding": {
        "x": _quantity("runs", "runs per load", scale=_LOG, axis=_DECADES),
        "y": _quantity(
            "cost",
            "cost, of the cheapest plan’s",
            scale={"type": "log", "nice": False},
            axis={"tickCount": 6},
        ),
        "color": _nominal("plan", sort=None),
        "strokeDash": _nominal("plan", sort=None),
        "tooltip": _told(),
    },
}

_SIDES: dict[str, Any] = {"domain": ["prepared", "noise floor"], "range": ["@c1", "@mark"]}

_ERRORS: dict[str, Any] = {
    "step": 24,
    "encoding": {"y": _ROWS, "tooltip": _told()},
    "layer": [
        {
            "mark": {"type": "rule", "style": "box"},
            "encoding": {
                "x": _quantity("least", "error, of its tolerance (1 is the limit)", scale=_LOG),
                "x2": {"field": "error"},
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {
                "x": _quantity(
                    "at", "error, of its tolerance (1 is the limit)", axis={"tickCount": 6, "format": "~g"}
                ),
                "color": _nominal("what", sort=None, scale=_SIDES),
                "shape": _nominal("what", sort=None, scale={"domain": _SIDES["domain"]}),
            },
        },
        {
            "mark": {"type": "rule", "style": "limit"},
            "encoding": {
                "x": _quantity("limit", "error, of its tolerance (1 is the limit)"),
                "y": None,
                "tooltip": None,
            },
        },
    ],
}

_SERIES = _nominal("series", sort=None, scale={"domain": "$series"})

_TREND: dict[str, Any] = {
    "height": 200,
    "encoding": {
        "x": {
            "field": "version",
            "type": "ordinal",
            "sort": None,
            "title": "version",
            "axis": {"labelAngle": 0},
        },
        "tooltip": _told(),
    },
    "layer": [
        {
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.35},
            "encoding": {"y": _quantity("p25", "$unit"), "y2": {"field": "p75"}, "color": _SERIES},
        },
        {"mark": "line", "encoding": {"y": _quantity("median", "$unit"), "color": _SERIES}},
        {
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
            "encoding": {"y": _quantity("median", "$unit"), "color": _SERIES, "shape": _SERIES},
        },
    ],
}

SPECS: dict[str, dict[str, Any]] = {
    "waterfall": _WATERFALL,
    "spread": _SPREAD,
    "gains": _GAINS,
    "front": _FRONT,
    "costs": _COSTS,
    "errors": _ERRORS,
    "trend": _TREND,
}
"""Specification by kind of chart."""
