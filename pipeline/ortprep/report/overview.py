"""What is said of all models together: how much sooner, and how sure. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.shipped import worst_error
from ortprep.report.content import Fact, ReportSection, ReportTable, Tone
from ortprep.report.formatting import (
    CellValue,
    format_ratio,
    make_table,
    number_cell,
    ratio_cell,
    text_cell,
)
from ortprep.report.speedup import HOW_SURE, TONES, Ratio, build_gain_facts, find_gain, mean_ratio


def build_overall_facts(newest: Sequence[Manifest]) -> tuple[Fact, ...]:
    """Returns the figures at the head of the page: of one variant its own, of several their means."""
    gains = [gain for one in newest for variant in one.variants if (gain := find_gain(variant)) is not None]
    if not gains:
        return ()
    if len(gains) == 1:
        return build_gain_facts(gains[0])
    sure = sum(gain.certainty == "beyond the noise" for gain in gains)
    tone: Tone = "good" if sure == len(gains) else "warning"
    counted = Fact(f"{sure} of {len(gains)}", "sooner beyond the noise", "variants that were measured", tone)
    columns = (
        ([gain.ready for gain in gains], "ready sooner"),
        ([gain.init for gain in gains], "init sooner"),
        ([gain.steady for gain in gains], "time per run, of default’s"),
        ([gain.private for gain in gains], "private memory, of default’s"),
    )
    return (counted, *(fact for ratios, label in columns for fact in _mean_fact(ratios, label)))


def _mean_fact(optional: Sequence[Ratio | None], label: str) -> Iterator[Fact]:
    ratios = [ratio for ratio in optional if ratio is not None]
    mean = mean_ratio(ratios)
    if mean is not None:
        values = [ratio.value for ratio in ratios]
        detail = f"geometric mean; {format_ratio(min(values))} to {format_ratio(max(values))}"
        yield Fact(format_ratio(mean), label, detail)


def build_overview(newest: Sequence[Manifest], anchors: Mapping[str, str]) -> ReportSection:
    """Returns every model beside the others, by its newest version; `anchors` lead to them by name."""
    tables = (_models_table(newest, anchors),) if len(newest) > 1 else ()
    return ReportSection("How much sooner, how sure", (HOW_SURE,), tables=tables)


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
