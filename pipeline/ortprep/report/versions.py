"""A model across its versions: what became sooner, smaller or slower from one to the next. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortprep.bundle.digest import digest_json
from ortprep.bundle.manifest import Manifest, PlanFigures, VariantRecord
from ortprep.measuring.shipped import find_plan, worst_error
from ortprep.report.content import ReportSection
from ortprep.report.environments import describe_machine
from ortprep.report.formatting import CellValue, format_instant, make_table, number_cell, ratio_cell
from ortprep.report.speedup import compare, find_gain, find_warm


def build_versions_section(manifests: Sequence[Manifest], variant: str | None) -> ReportSection | None:
    """Returns how a variant's figures changed over versions, oldest first; None of fewer than two."""
    if len(manifests) < 2:
        return None
    columns = (
        ">version",
        "prepared",
        ">ready ms",
        ">sooner than default",
        ">ready, of the version before’s",
        ">steady ms",
        ">steady, of the version before’s",
        ">private MB",
        ">bundle MB",
        ">worst error, of its tolerance",
        "spec",
        "~machine",
    )
    rows = [
        _version_row(number, manifest, before, variant)
        for number, (before, manifest) in enumerate(zip((None, *manifests), manifests, strict=False), 1)
    ]
    table = make_table("Versions, oldest first", columns, rows, sortable=True)
    return ReportSection("Across versions", tuple(_notes(manifests, variant)), tables=(table,))


def _notes(manifests: Sequence[Manifest], variant: str | None) -> Iterator[str]:
    yield f"Variant {variant or 'none'}. The parts below describe version {len(manifests)}, the newest."
    if len({digest_json(manifest.environment.get("hardware")) for manifest in manifests}) > 1:
        yield (
            "Not all versions were measured on equal hardware, so part of a difference may be the machine’s; "
            "ratios to the default of the same version remain valid."
        )


def _find_variant(manifest: Manifest | None, name: str | None) -> VariantRecord | None:
    variants = manifest.variants if manifest else ()
    return next((variant for variant in variants if variant.name == name), None)


def _shipped(variant: VariantRecord | None) -> PlanFigures | None:
    if variant is None or variant.decision is None:
        return None
    return find_plan(find_warm(variant), variant.decision.shipped)


def _version_row(
    number: int, manifest: Manifest, before: Manifest | None, name: str | None
) -> tuple[CellValue, ...]:
    variant = _find_variant(manifest, name)
    plan, earlier = _shipped(variant), _shipped(_find_variant(before, name))
    gain = find_gain(variant) if variant else None
    worst = worst_error(variant) if variant else None
    ready = compare(plan.ready_ms, earlier.ready_ms) if plan and earlier else None
    steady = compare(plan.steady_ms, earlier.steady_ms) if plan and earlier else None
    return (
        number,
        format_instant(manifest.created_at),
        plan.ready_ms if plan else None,
        ratio_cell(gain.ready.value if gain and gain.ready else None),
        ratio_cell(ready.value if ready else None),
        plan.steady_ms if plan else None,
        ratio_cell(steady.value if steady else None),
        plan.private_mb if plan else None,
        sum(entry.size_bytes for entry in manifest.files) / 2**20,
        number_cell(worst, None if worst is None else f"{worst:.2g}"),
        manifest.spec_digest.removeprefix("sha256:")[:8],
        describe_machine(manifest.environment),
    )
