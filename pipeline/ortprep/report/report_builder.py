"""From records to a report: what is said, in which order. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortprep.bundle.digest import digest_json
from ortprep.bundle.environment import list_facts
from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.shipped import worst_error
from ortprep.report.content import Fact, ModelPart, Report, ReportSection, ReportSubject, VariantPart
from ortprep.report.speedup import (
    GAINS,
    HOW_SURE,
    TONES,
    Gain,
    build_gain_facts,
    describe_gain,
    find_gain,
    headline_variant,
)
from ortprep.report.trials import build_search_section
from ortprep.report.variant_sections import (
    build_conversion_section,
    build_measurement_sections,
    build_options_section,
    build_verification_section,
)
from ortprep.tables import (
    Cell,
    Table,
    Tone,
    count_of,
    fill_table,
    format_instant,
    format_mb,
    join_words,
    number_cell,
    ratio_cell,
)

_GPU_NAME = re.compile(r"hardware\.gpus\.\d+\.name")


def build_report(subjects: Sequence[ReportSubject], *, version: str) -> Report:
    """Returns what is said of some bundles, in their order, by a version of ortprep."""
    manifests = [subject.manifest for subject in subjects]
    names = [manifest.name for manifest in manifests]
    last = format_instant(max((manifest.created_at for manifest in manifests), default="never"))
    overview = (_models_table(manifests),) if len(manifests) > 1 else ()
    return Report(
        title=f"{names[0]}: prepared by ortprep" if len(set(names)) == 1 else "Models prepared by ortprep",
        subtitle=f"{count_of(len(subjects), 'bundle')}; last prepared {last}; report by ortprep {version}",
        facts=_overall_facts(manifests),
        sections=(ReportSection("How much sooner, how sure", (HOW_SURE,), tables=overview),),
        models=tuple(
            _model_part(number, subject, is_alone=names.count(subject.manifest.name) == 1)
            for number, subject in enumerate(subjects, 1)
        ),
        environments=tuple(_environment_sections(manifests)),
    )


# -- all bundles


def _overall_facts(manifests: Sequence[Manifest]) -> tuple[Fact, ...]:
    """Returns the figures at the head of the page: of one variant its own, of several how many are sooner."""
    gains = [gain for manifest in manifests for one in manifest.variants if (gain := find_gain(one))]
    if len(gains) < 2:
        return build_gain_facts(gains[0]) if gains else ()
    sure = sum(gain.certainty == "beyond the noise" for gain in gains)
    tone: Tone = "good" if sure == len(gains) else "warning"
    return (Fact(f"{sure} of {len(gains)}", "sooner beyond the noise", "variants that were measured", tone),)


def _models_table(manifests: Sequence[Manifest]) -> Table:
    """Returns a row per measured variant of every bundle, or one of a bundle without any."""
    rows: list[tuple[str, Manifest, VariantRecord | None, Gain | None]] = []
    for number, manifest in enumerate(manifests, 1):
        measured = [one for one in manifest.variants if find_gain(one)]
        shown: Sequence[VariantRecord | None] = measured or manifest.variants[:1] or [None]
        rows += [(_anchor(number), manifest, one, find_gain(one) if one else None) for one in shown]

    def ratio(gain: Gain | None, index: int) -> Cell:
        found = gain.ratios[index] if gain else None
        return ratio_cell(found.value if found else None)

    def sure(gain: Gain | None) -> Cell:
        certainty = gain.certainty if gain else "not compared"
        return Cell(certainty, tone=TONES[certainty])

    def error(variant: VariantRecord | None) -> Cell | None:
        worst = worst_error(variant) if variant else None
        return None if worst is None else number_cell(worst, f"{worst:.2g}")

    return fill_table(
        "All models",
        rows,
        (
            ("model", lambda row: Cell(row[1].name, link=row[0])),
            ("variant", lambda row: row[2].name if row[2] else None),
            ("how sure", lambda row: sure(row[3])),
            (GAINS[0][0], lambda row: ratio(row[3], 0)),
            ("default’s, ms", lambda row: row[3].default.ready_ms if row[3] and row[3].default else None),
            ("shipped, ms", lambda row: row[3].plan.ready_ms if row[3] and row[3].plan else None),
            (GAINS[1][0], lambda row: ratio(row[3], 1)),
            (GAINS[2][0], lambda row: ratio(row[3], 2)),
            (GAINS[3][0], lambda row: ratio(row[3], 3)),
            ("worst error, of its tolerance", lambda row: error(row[2])),
            ("bundle MB", lambda row: sum(entry.size_bytes for entry in row[1].files) / 2**20),
            ("prepared", lambda row: row[1].created_at[:10]),
        ),
    )


def _anchor(number: int) -> str:
    return f"model-{number}"


# -- one bundle


def _model_part(number: int, subject: ReportSubject, *, is_alone: bool) -> ModelPart:
    """Returns all of a bundle; its date is part of its name where others have the same name."""
    manifest = subject.manifest
    headline = headline_variant(manifest)
    gain = find_gain(headline) if headline else None
    return ModelPart(
        anchor=_anchor(number),
        name=manifest.name if is_alone else f"{manifest.name}, {format_instant(manifest.created_at)}",
        headline=describe_gain(gain),
        tone=TONES[gain.certainty] if gain else "plain",
        notes=tuple(_notes(manifest)),
        history=_history_sections(subject.history),
        variants=tuple(
            VariantPart(
                f"Variant {variant.name}: target {variant.target}, graph optimised at level {variant.level}",
                build_gain_facts(find_gain(variant)),
                tuple(_variant_sections(subject, variant)),
            )
            for variant in manifest.variants
        ),
    )


def _notes(manifest: Manifest) -> Iterator[str]:
    """Yields where a bundle is from, and what is missing in it."""
    source = manifest.source
    size = sum(entry.size_bytes for entry in manifest.files)
    yield (
        f"Prepared {format_instant(manifest.created_at)} by ortprep {manifest.pipeline_version}; "
        f"{format_mb(size)} in {count_of(len(manifest.files), 'file')}."
    )
    yield (
        f"Source: {source.kind} {source.location}, {format_mb(source.initializer_bytes)} of weights, "
        f"{count_of(sum(source.operators.values()), 'node')}, {source.sha256}."
    )
    for target, reason in manifest.missing_targets.items():
        yield f"Target {target} is missing: {reason}."
    for left_out in manifest.left_out:
        yield f"Variant {left_out.variant} is left out: {left_out.reason}."


def _variant_sections(subject: ReportSubject, variant: VariantRecord) -> Iterator[ReportSection]:
    """Yields the sections of a variant: the decision first, then what led to it."""
    if variant.decision is not None:
        reason = variant.decision.reason
        yield ReportSection(f"Ships {variant.decision.shipped}", (f"{reason[:1].upper()}{reason[1:]}.",))
    yield from build_conversion_section(variant)
    yield from build_measurement_sections(variant)
    if variant.tuning is not None:
        yield build_search_section(variant.tuning)
    yield build_verification_section(variant)
    yield from build_options_section(subject, variant)


def _history_sections(history: Table | None) -> tuple[ReportSection, ...]:
    if history is None or not history.rows:
        return ()
    note = (
        "Each task of the build, when it was last run and why; “ortprep explain” says what would be run now."
    )
    return (ReportSection("What was rebuilt, and why", (note,), tables=(history,)),)


# -- environments


def _environment_sections(manifests: Sequence[Manifest]) -> Iterator[ReportSection]:
    """Yields a section per distinct environment, with the models that are from it."""
    found: dict[str, tuple[Mapping[str, Any], dict[str, None]]] = {}
    for manifest in manifests:
        environment = manifest.environment
        found.setdefault(digest_json(environment), (environment, {}))[1][manifest.name] = None
    for environment, owners in found.values():
        table = Table("Versions and hardware", ("what", "value"), tuple(_describe_facts(environment)))
        notes = (f"Prepared here: {join_words([*owners])}.",)
        yield ReportSection(describe_machine(environment), notes, tables=(table,), quiet=True)


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Returns processor or GPU, cores and ONNX Runtime in a few words."""
    facts = list_facts(environment)
    parts = [
        facts.get("hardware.cpu_model", ""),
        f"{facts['hardware.cores']} cores" if "hardware.cores" in facts else "",
        join_words([text for name, text in facts.items() if _GPU_NAME.fullmatch(name)]),
        f"ONNX Runtime {facts['onnxruntime']}" if "onnxruntime" in facts else "",
    ]
    return ", ".join(part for part in parts if part) or "not recorded"


def _describe_facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of what a bundle was made with, sizes in MB too."""
    for name, text in list_facts(environment).items():
        is_size = name.endswith("_bytes") and text.isascii() and text.isdecimal() and len(text) < 20
        yield name, f"{text} ({format_mb(int(text))})" if is_size else text
