"""From records to a report: what is said, in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.report.content import ModelPart, Report, ReportSection, VariantPart
from ortprep.report.conversion_section import build_conversion_section
from ortprep.report.environments import build_environment_sections
from ortprep.report.formatting import (
    count_of,
    format_duration,
    format_instant,
    format_mb,
    make_table,
    number_cell,
)
from ortprep.report.front_charts import build_break_even_table, build_front_charts
from ortprep.report.measurement_sections import build_measurement_sections
from ortprep.report.options_section import build_options_section
from ortprep.report.overview import build_overall_facts, build_overview
from ortprep.report.report_subjects import ReportSubject, TaskHistory
from ortprep.report.speedup import TONES, build_gain_facts, describe_gain, find_gain, headline_variant
from ortprep.report.trials import build_trials_table
from ortprep.report.verification_section import build_verification_section
from ortprep.report.versions import build_versions_section


def build_report(subjects: Sequence[ReportSubject], *, version: str) -> Report:
    """Returns what is said of some models; several subjects of one name are versions of one model."""
    models = _group(subjects)
    manifests = [versions[-1].manifest for versions in models.values()]
    parts = tuple(_model_part(index, versions) for index, versions in enumerate(models.values()))
    names = list(models)
    return Report(
        title=f"{names[0]}: prepared by ortprep" if len(names) == 1 else "Models prepared by ortprep",
        subtitle=_subtitle(models, version),
        facts=build_overall_facts(manifests),
        sections=(build_overview(manifests, {part.name: part.anchor for part in parts}),),
        models=parts,
        environments=build_environment_sections(manifests),
    )


def _group(subjects: Sequence[ReportSubject]) -> Mapping[str, tuple[ReportSubject, ...]]:
    """Returns versions by model, oldest first; the models in the order they were named."""
    named: dict[str, list[ReportSubject]] = {}
    for subject in subjects:
        named.setdefault(subject.manifest.name, []).append(subject)
    return {
        name: tuple(sorted(found, key=lambda one: (one.manifest.created_at, one.manifest.spec_digest)))
        for name, found in named.items()
    }


def _subtitle(models: Mapping[str, Sequence[ReportSubject]], version: str) -> str:
    instants = [subject.manifest.created_at for versions in models.values() for subject in versions]
    many = sum(map(len, models.values()))
    counts = [count_of(len(models), "model"), *([count_of(many, "version")] if many > len(models) else [])]
    span = format_instant(max(instants)) if instants else "never"
    return f"{', '.join(counts)}; last prepared {span}; report by ortprep {version}"


def _model_part(index: int, versions: Sequence[ReportSubject]) -> ModelPart:
    newest = versions[-1]
    manifest = newest.manifest
    headline = headline_variant(manifest)
    gain = find_gain(headline) if headline else None
    manifests = [subject.manifest for subject in versions]
    versions_section = build_versions_section(manifests, headline.name if headline else None)
    return ModelPart(
        anchor=f"model-{index + 1}",
        name=manifest.name,
        headline=describe_gain(gain),
        tone=TONES[gain.certainty] if gain else "plain",
        notes=tuple(_notes(manifest)),
        versions=(versions_section,) if versions_section else (),
        history=tuple(_history_section(newest.history)),
        variants=tuple(_variant_part(newest, variant) for variant in manifest.variants),
    )


def _notes(manifest: Manifest) -> Iterator[str]:
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
    if manifest.spec_commit is not None:
        yield f"Spec: commit {manifest.spec_commit}."
    for missing in manifest.missing_targets:
        yield f"Target {missing.target} is missing: {missing.reason}."
    for left_out in manifest.left_out:
        yield f"Variant {left_out.variant} is left out: {left_out.reason}."


def _variant_part(subject: ReportSubject, variant: VariantRecord) -> VariantPart:
    gain = find_gain(variant)
    options = build_options_section(subject, variant)
    converted = build_conversion_section(variant)
    sections = [
        *_decision_section(variant),
        *([converted] if converted else []),
        *build_measurement_sections(variant),
        *_search_section(variant),
        build_verification_section(variant),
        *([options] if options else []),
    ]
    title = f"Variant {variant.name}: target {variant.target}, graph optimised at level {variant.level}"
    return VariantPart(title, build_gain_facts(gain), tuple(sections))


def _decision_section(variant: VariantRecord) -> Iterator[ReportSection]:
    if variant.decision is not None:
        reason = variant.decision.reason
        yield ReportSection(f"Ships {variant.decision.shipped}", (f"{reason[:1].upper()}{reason[1:]}.",))


def _search_section(variant: VariantRecord) -> Iterator[ReportSection]:
    record = variant.tuning
    if record is None:
        return
    notes = [
        f"{count_of(len(record.trials), 'plan')} of {count_of(record.combinations, 'combination')} tried in "
        f"{format_duration(record.elapsed_s)}, until {record.ended}; noise {record.noise:.1%}.",
        f"Chosen: trial {record.chosen}: {record.reason}.",
    ]
    if record.limits:
        limits = ", ".join(f"{name} {value:g}" for name, value in record.limits.items())
        notes.append(f"Limits: {limits}.")
    if record.first_phase is not None:
        notes.append(
            f"Trial {record.first_phase.trial} may serve until it is ready (load_progressive); both sessions "
            f"together take about {record.first_phase.overlap_mb:.0f} MB."
        )
    tables = ([build_break_even_table(record)] if record.front else []) + [build_trials_table(record)]
    yield ReportSection("Search", tuple(notes), build_front_charts(record), tuple(tables))


def _history_section(history: Sequence[TaskHistory]) -> Iterator[ReportSection]:
    if not history:
        return
    columns = ("task", "last run", ">took", "~because")
    rows = tuple(
        (
            built.task,
            format_instant(built.finished_at),
            number_cell(built.elapsed_s, format_duration(built.elapsed_s)),
            "; ".join(built.reasons) or "not recorded",
        )
        for built in sorted(history, key=lambda one: one.finished_at)
    )
    note = (
        "Each task of the build, when it was last run and why; “ortprep explain” says what would be run now."
    )
    yield ReportSection(
        "What was rebuilt, and why", (note,), tables=(make_table("Tasks of the build", columns, rows),)
    )
