"""Writes the results of `bench.load_cost` into README and docs/performance.md.

    python -m bench.load_cost_tables

Reads `bench/results/load_cost.json`, and replaces the text between the markers
`<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from bench.load_cost import FALLBACK, HAND, HAND_OUTSIDE, LOAD, NEW_CONTAINER, NOT_HASHED, PLAIN
from bench.start import ROOT

RESULTS = ROOT / "bench" / "results"

TITLES = {
    "gpt2": "GPT-2",
    "bert-base": "BERT-base",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "bilstm": "BiLSTM",
    "rapidocr-rec": "RapidOCR recogniser",
    "ddddocr": "ddddocr",
    "silero-vad": "Silero VAD",
    "basic-pitch": "Basic Pitch",
}
"""Models in README's table; docs/performance.md has all of them."""

SETS = {"large": "large models", "small": "small models"}

Section = Mapping[str, Any]


def readme_table(report: Mapping[str, Section]) -> str:
    """Returns a row per model of `TITLES`, and a row of means per set, of all of its models.

    Cells have the median time from the start of a process to its first result, in ms; the rows of means, how
    many times sooner than plain ONNX Runtime that is.
    """
    columns = {
        "hand_outside": ("by hand", HAND_OUTSIDE),
        "load": ("`load`", LOAD),
        "new_container": ("`load`, new container", NEW_CONTAINER),
        "not_hashed": ('new container, `digests="off"`', NOT_HASHED),
    }
    rows = []
    for kind, title in SETS.items():
        section = report[kind]
        ratios = section["ratios"]
        for name in (name for name in TITLES if name in ratios):
            medians = section["models"][name]
            times = [medians[arm]["ready_ms"]["median"] for _, arm in (("", PLAIN), *columns.values())]
            cells = [f"{one:.0f} ms" for one in times]
            size_mb = section["source_mb"][name]
            rows.append([f"{TITLES[name]}, {size_mb:.{0 if size_mb >= 1 else 1}f} MB", *cells])
        means = {
            key: geometric_mean(figures[key] for figures in ratios.values())
            for key in (f"{arm}_sooner" for arm in columns)
        }
        cells = ["1", *(f"**{means[f'{arm}_sooner']:.2f}×**" for arm in columns)]
        rows.append([f"**{len(ratios)} {title}, mean gain**", *cells])
    return _table(["", "plain", *(name for name, _ in columns.values())], rows)


def _better(relative: float) -> str:
    """Returns how many times better a figure is, of which less is better, given it relative to plain."""
    return f"{1 / relative:.2f}×"


def performance_tables(report: Mapping[str, Section]) -> str:
    """Returns a table per set with every model: medians in ms, times better than plain, goals."""
    parts = []
    for kind in ("small", "large"):
        if kind not in report:
            continue
        section = report[kind]
        measured = next(iter(section["models"].values()))
        arms = [arm for arm in _KEYS if arm in measured]
        header = ["model", PLAIN, *(f"{arm}: {what}" for arm in arms for what in _figures_of(arm))]
        rows = [_performance_row(section, name, arms) for name in section["ratios"]]
        parts.append(_table([*header, "private memory", "`load` adds"], rows))
        goals = [
            [one["goal"], f"{one['got']:.2f}", "reached" if one["reached"] else "missed"]
            for one in section["verdicts"]
        ]
        parts.append(_table([f"goal, {kind} models", "got", ""], goals))
    return "\n\n".join(parts)


_KEYS = {
    HAND: "hand",
    HAND_OUTSIDE: "hand_outside",
    LOAD: "load",
    NEW_CONTAINER: "new_container",
    NOT_HASHED: "not_hashed",
    FALLBACK: "fallback",
}
"""Arms of the tables, with what their figures begin with."""


def _figures_of(arm: str) -> tuple[str, ...]:
    return ("first result",) if arm in (NEW_CONTAINER, NOT_HASHED) else ("first result", "later runs")


def _performance_row(section: Section, name: str, arms: Sequence[str]) -> list[str]:
    figures, medians = section["ratios"][name], section["models"][name]

    def milliseconds(arm: str, figure: str) -> str:
        return f"{medians[arm][figure]['median']:.{0 if medians[arm][figure]['median'] >= 10 else 1}f}"

    cells = [f"{name}, {section['source_mb'][name]:.1f} MB"]
    cells.append(f"{milliseconds(PLAIN, 'ready_ms')}, {milliseconds(PLAIN, 'steady_ms')} ms")
    for arm in arms:
        ready, key = milliseconds(arm, "ready_ms"), _KEYS[arm]
        cells.append(f"{ready} ms ({figures[f'{key}_sooner']:.2f}×)")
        cells += [_better(figures[f"{key}_steady"])] if "later runs" in _figures_of(arm) else []
    adds = f"{figures['load_adds_ms']:.1f} ms" if "load_adds_ms" in figures else "not measured"
    return [*cells, _better(figures["load_private"]), adds]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_between(text: str, name: str, new: str) -> str:
    """Returns a text with the part between the markers of a name replaced.

    Raises:
        ValueError: It has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no markers: {begin.strip()} … {end.strip()}")
    return f"{before}{begin}{new}{end}{after}"


def main() -> int:
    """Replaces the tables; returns 0."""
    file = RESULTS / "load_cost.json"
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if report is None:
        raise SystemExit(
            "nothing measured yet\n\nhint: python -m bench.load_cost --out bench/results/load_cost.json"
        )
    readme, performance = ROOT / "README.md", ROOT / "docs" / "performance.md"
    tables = (
        (readme, "bench.load_cost", readme_table(report)),
        (performance, "bench.load_cost", performance_tables(report)),
    )
    for path, name, table in tables:
        path.write_text(replace_between(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
