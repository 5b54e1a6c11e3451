"""What is said of all models together: how much sooner, and how sure. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.shipped import worst_error
from ortprep.report.content import Chart, Fact, ReportSection, ReportTable, Tone
from ortprep.report.formatting import (
    CellValue,
    format_ratio,
    make_table,
    number_cell,
    ratio_cell,
    rounded,
    text_cell,
)
from ortprep.report.speedup import HOW_SURE, TONES, Gain, Ratio, build_gain_facts, find_gain, mean_ratio

SURE = list(TONES)


@dataclass(frozen=True)
class _Gained:
    """A variant of a model, and what preparing it achieved."""

    manifest: Manifest
    variant: VariantRecord
    gain: Gain

    @property
    def row(self) -> str:
        """How a chart names it."""
        return f"{self.manifest.name} ({self.variant.name})"


def _gains(newest: Sequence[Manifest]) -> list[_Gained]:
    return [
        _Gained(manifest, variant, gain)
        for manifest in newest
        for variant in manifest.variants
        if (gain := find_gain(variant)) is not None
    ]


def build_overall_facts(newest: Sequence[Manifest]) -> tuple[Fact, ...]:
    """Returns the figures at the head of the page: of one variant its own, of several their means."""
    gains = [one.gain for one in _gains(newest)]
    if not gains:
        return ()
    if len(gains) == 1:
        return build_gain_facts(gains[0])
    sure = sum(gain.certainty == "beyond the noise" for gain in gains)
    tone: Tone = "good" if sure == len(gains) else "warning"
    counted = Fact(f"{sure} of {len(gains)}", "sooner beyond the noise", "variants that were measured", tone)
    named = (
        ([gain.ready for gain in gains], "ready sooner"),
        ([gain.init for gain in gains], "init sooner"),
        ([gain.steady for gain in gains], "time per run, of default’s"),
        ([gain.private for gain in gains], "private memory, of default’s"),
    )
    return (counted, *(fact for found, label in named for fact in _mean_fact(found, label)))


def _mean_fact(found: Sequence[Ratio | None], label: str) -> Iterator[Fact]:
    ratios = [ratio for ratio in found if ratio is not None]
    mean = mean_ratio(ratios)
    if mean is not None:
        values = [ratio.value for ratio in ratios]
        detail = f"geometric mean; {format_ratio(min(values))} to {format_ratio(max(values))}"
        yield Fact(format_ratio(mean), label, detail)


def build_overview(newest: Sequence[Manifest], anchors: Mapping[str, str]) -> ReportSection:
    """Returns every model beside the others, by its newest version; `anchors` lead to them by name."""
    gains = _gains(newest)
    charts = (_gains_chart(gains),) if len(gains) > 1 else ()
    tables = (_models_table(newest, anchors),) if len(newest) > 1 else ()
    return ReportSection("How much sooner, how sure", (HOW_SURE,), charts, tables)


def _gains_chart(gains: Sequence[_Gained]) -> Chart:
    found = [(one, one.gain.ready) for one in gains if one.gain.ready is not None]
    drawn = sorted(
        ((one, ratio) for one, ratio in found if ratio is not None), key=lambda pair: -pair[1].value
    )
    return Chart(
        kind="gains",
        title="Ready: how many times sooner than default ONNX Runtime",
        values=tuple(_gain_row(one, ratio) for one, ratio in drawn),
        table=_gains_table(drawn),
        parameters={"unit": "times sooner than default ONNX Runtime", "sure": SURE},
        wide=True,
    )


def _gain_row(one: _Gained, ratio: Ratio) -> Mapping[str, Any]:
    return {
        "row": one.row,
        "value": rounded(ratio.value),
        "low": rounded(ratio.low),
        "high": rounded(ratio.high),
        "sure": one.gain.certainty,
    }


def _gains_table(drawn: Sequence[tuple[_Gained, Ratio]]) -> ReportTable:
    columns = (
        "model and variant",
        ">ready sooner",
        ">with the nearer quartiles",
        ">with the further ones",
        "how sure",
    )
    rows = [
        (
            text_cell(one.row),
            *(ratio_cell(value) for value in (ratio.value, ratio.low, ratio.high)),
            text_cell(one.gain.certainty, TONES[one.gain.certainty]),
        )
        for one, ratio in drawn
    ]
    return make_table("Ready sooner", columns, rows)


def _models_table(newest: Sequence[Manifest], anchors: Mapping[str, str]) -> ReportTable:
    columns = (
        "~model",
        "variant",
        "how sure",
        ">ready sooner",
        ">default’s, ms",
        ">shipped, ms",
        ">init sooner",
        ">time per run, of default’s",
        ">private memory, of default’s",
        ">worst error, of its tolerance",
        ">bundle MB",
        "prepared",
    )
    rows = tuple(
        _model_row(manifest, variant, anchors[manifest.name])
        for manifest in newest
        for variant in _shown_variants(manifest)
    )
    return make_table("All models, newest versions", columns, rows, sortable=True, filterable=True)


def _shown_variants(manifest: Manifest) -> tuple[VariantRecord | None, ...]:
    measured = tuple(variant for variant in manifest.variants if find_gain(variant))
    return measured or manifest.variants[:1] or (None,)


def _model_row(manifest: Manifest, variant: VariantRecord | None, anchor: str) -> tuple[CellValue, ...]:
    gain = find_gain(variant) if variant else None
    worst = worst_error(variant) if variant else None
    certainty = gain.certainty if gain else "not compared"
    ratios = (gain.ready, gain.init, gain.steady, gain.private) if gain else (None,) * 4
    first, *others = (ratio_cell(ratio.value if ratio else None) for ratio in ratios)
    return (
        text_cell(manifest.name, link=anchor),
        variant.name if variant else "",
        text_cell(certainty, TONES[certainty]),
        first,
        gain.default_ready if gain else None,
        gain.shipped_ready if gain else None,
        *others,
        number_cell(worst, None if worst is None else f"{worst:.2g}"),
        sum(entry.size_bytes for entry in manifest.files) / 2**20,
        manifest.created_at[:10],
    )
