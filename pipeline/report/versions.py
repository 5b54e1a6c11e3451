"""A model across its versions: what became sooner, smaller or slower from one to the next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.digest import digest_json
from ortprep.bundle.manifest import Manifest, MeasurementRecord, PlanFigures, VariantRecord
from ortprep.bundle.tuning_record import Summary
from ortprep.measuring.shipped import find_plan, worst_error
from ortprep.report.content import Chart, ReportSection, ReportTable
from ortprep.report.environments import describe_machine
from ortprep.report.formatting import (
    CellValue,
    format_instant,
    format_number,
    format_ratio,
    format_spread,
    make_table,
    number_cell,
    ratio_cell,
    rounded,
)
from ortprep.report.measurement_sections import build_summary_table
from ortprep.report.speedup import DEFAULT, compare, find_gain, find_warm

FIGURES: tuple[tuple[str, str, Callable[[PlanFigures], Summary | None]], ...] = (
    ("ready", "ms", lambda plan: plan.ready_ms),
    ("steady run", "ms", lambda plan: plan.steady_ms),
    ("private memory", "MB", lambda plan: plan.private_mb),
)


@dataclass(frozen=True)
class _Version:
    """A version's figures of one variant."""

    number: int
    manifest: Manifest
    variant: VariantRecord | None
    shipped: PlanFigures | None
    default: PlanFigures | None


def order_versions(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Returns a model's versions, oldest first."""
    return tuple(sorted(manifests, key=lambda one: (one.created_at, one.spec_digest)))


def build_versions_section(manifests: Sequence[Manifest], variant: str | None) -> ReportSection | None:
    """Returns how a variant's figures went through versions, oldest first; None of fewer than two."""
    if len(manifests) < 2:
        return None
    versions = tuple(_version(number, one, variant) for number, one in enumerate(manifests, 1))
    charts = [
        chart for name, unit, figure in FIGURES if (chart := _trend(versions, name, unit, figure)) is not None
    ]
    charts.append(_size_trend(versions))
    return ReportSection(
        "Across versions", tuple(_notes(versions)), tuple(charts), (_versions_table(versions),)
    )


def _version(number: int, manifest: Manifest, name: str | None) -> _Version:
    variant = next((one for one in manifest.variants if one.name == name), None)
    measurement = find_warm(variant) if variant else None
    if variant is None or measurement is None:
        return _Version(number, manifest, variant, None, None)
    return _Version(
        number, manifest, variant, _shipped(variant, measurement), find_plan(measurement, DEFAULT)
    )


def _shipped(variant: VariantRecord, measurement: MeasurementRecord) -> PlanFigures | None:
    return find_plan(measurement, variant.decision.shipped) if variant.decision else None


def _notes(versions: Sequence[_Version]) -> Iterator[str]:
    yield (
        f"Version 1 is the oldest, version {len(versions)} the one that is told below; variant "
        f"{next((one.variant.name for one in versions if one.variant), 'none')}."
    )
    if len({_hardware_digest(one.manifest) for one in versions}) > 1:
        yield (
            "Not all versions were measured on equal hardware, so part of a difference may be the machine’s; "
            "ratios to the default of the same version stand."
        )


def _hardware_digest(manifest: Manifest) -> str:
    return digest_json(manifest.environment.get("hardware"))


def _trend(
    versions: Sequence[_Version], name: str, unit: str, figure: Callable[[PlanFigures], Summary | None]
) -> Chart | None:
    found = {
        (one.number, series): summary
        for one in versions
        for series, plan in (("shipped", one.shipped), (DEFAULT, one.default))
        if plan is not None and (summary := figure(plan)) is not None
    }
    if not found:
        return None
    shipped = {number: one for (number, series), one in found.items() if series == "shipped"}
    told = ", ".join(f"version {number} {format_spread(one)} {unit}" for number, one in shipped.items())
    return Chart(
        kind="trend",
        title=f"{name.capitalize()} by version",
        text=f"Shipped: {told or 'not measured'}.{_change_text(list(shipped.values()))}",
        values=tuple(_trend_row(number, series, one, unit, name) for (number, series), one in found.items()),
        table=build_summary_table(
            f"{name.capitalize()} by version, {unit}",
            {f"version {number}, {series}": one for (number, series), one in found.items()},
        ),
        parameters={"unit": f"{name}, {unit}", "series": ["shipped", DEFAULT]},
    )


def _change_text(summaries: Sequence[Summary]) -> str:
    ratio = compare(summaries[-1], summaries[0]) if len(summaries) > 1 else None
    if ratio is None:
        return ""
    apart = "quartiles apart" if ratio.is_apart else "quartiles overlap"
    return f" The last is {format_ratio(ratio.value)} the first, {apart}."


def _trend_row(number: int, series: str, summary: Summary, unit: str, name: str) -> Mapping[str, Any]:
    return {
        "version": str(number),
        "series": series,
        "median": rounded(summary.median),
        "p25": rounded(summary.p25),
        "p75": rounded(summary.p75),
        "told": f"version {number}, {series}: {name} {format_spread(summary)} {unit}",
    }


def _size_trend(versions: Sequence[_Version]) -> Chart:
    sizes = {one.number: _size_mb(one.manifest) for one in versions}
    told = ", ".join(f"version {number} {format_number(size)} MB" for number, size in sizes.items())
    values = tuple(
        {
            "version": str(number),
            "series": "bundle",
            **dict.fromkeys(("median", "p25", "p75"), rounded(size)),
            "told": f"version {number}: {format_number(size)} MB",
        }
        for number, size in sizes.items()
    )
    return Chart(
        kind="trend",
        title="Size of the bundle by version",
        text=f"{told}.",
        values=values,
        table=make_table("Size of the bundle by version", (">version", ">bundle MB"), sizes.items()),
        parameters={"unit": "bundle, MB", "series": ["bundle"]},
    )


def _size_mb(manifest: Manifest) -> float:
    return sum(entry.size_bytes for entry in manifest.files) / 2**20


def _versions_table(versions: Sequence[_Version]) -> ReportTable:
    columns = (
        ">version",
        "prepared",
        ">ready ms",
        ">sooner than default",
        ">of the version before’s",
        ">steady ms",
        ">private MB",
        ">bundle MB",
        ">worst error, of its tolerance",
        "spec",
        "commit",
        "~machine",
    )
    befores = (None, *versions)
    rows = tuple(_version_row(one, before) for one, before in zip(versions, befores, strict=False))
    return make_table("Versions, oldest first", columns, rows, sortable=True)


def _version_row(one: _Version, before: _Version | None) -> tuple[CellValue, ...]:
    manifest, plan = one.manifest, one.shipped
    gain = find_gain(one.variant) if one.variant else None
    worst = worst_error(one.variant) if one.variant else None
    change = compare(plan.ready_ms, before.shipped.ready_ms) if plan and before and before.shipped else None
    return (
        one.number,
        format_instant(manifest.created_at),
        plan.ready_ms if plan else None,
        ratio_cell(gain.ready.value if gain and gain.ready else None),
        ratio_cell(change.value if change else None),
        plan.steady_ms if plan else None,
        plan.private_mb if plan else None,
        _size_mb(manifest),
        number_cell(worst, None if worst is None else f"{worst:.2g}"),
        manifest.spec_digest.removeprefix("sha256:")[:8],
        manifest.git.commit[:8] + (" (modified)" if manifest.git.modified else "") if manifest.git else "",
        describe_machine(manifest.environment),
    )
