"""The options a variant is loaded with: value, ONNX Runtime's default and effect; and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortprep.bundle.manifest import VariantRecord
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import SpecError
from ortprep.options import (
    NEWEST,
    Option,
    known_attributes,
    known_provider_options,
    known_session_config,
    version_parts,
)
from ortprep.report.content import ReportSection, ReportTable
from ortprep.report.formatting import make_table
from ortprep.report.report_subjects import ReportSubject
from ortprep.report.trials import build_knobs_table, find_chosen

LEVEL = "graph_optimization_level"
SESSION = "session"


@dataclass(frozen=True)
class _Chosen:
    """One option: where it is set, its name and value as text."""

    place: str
    name: str
    value: str


def build_options_section(subject: ReportSubject, variant: VariantRecord) -> ReportSection | None:
    """Returns the options jobs load a variant with, None where they are not known."""
    plan = _loaded_with(subject, variant)
    if plan is None:
        return None
    chosen = tuple(_options_of(*plan))
    notes = ["Options that are not listed keep ONNX Runtime's own defaults."]
    tables = [_options_table(chosen, _known_options(subject, plan[1]))]
    if variant.tuning is None:
        notes.append("There was no search for this variant.")
    else:
        knobs = build_knobs_table(variant.tuning)
        tables += [knobs] if knobs else []
    return ReportSection("Options, and why", tuple(notes), tables=tuple(tables))


def _loaded_with(
    subject: ReportSubject, variant: VariantRecord
) -> tuple[SessionOptionsRecord, tuple[ProviderRecord, ...]] | None:
    listed = subject.loader.variants if subject.loader else ()
    for listed_variant in listed:
        if listed_variant.name == variant.name:
            return listed_variant.session_options, listed_variant.providers
    trial = find_chosen(variant.tuning) if variant.tuning else None
    if trial is None or trial.session_options is None:
        return None
    return trial.session_options, trial.providers


def _options_of(
    options: SessionOptionsRecord | None, providers: tuple[ProviderRecord, ...]
) -> Iterator[_Chosen]:
    if options is not None:
        yield _Chosen(SESSION, LEVEL, options.graph_optimization_level)
        for name, value in {**options.attributes, **options.config_entries}.items():
            yield _Chosen(SESSION, name, _as_text(value))
    for provider in providers:
        yield _Chosen(provider.name, "", "")
        for name, text in provider.options.items():
            yield _Chosen(provider.name, name, text)


def _as_text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _known_options(
    subject: ReportSubject, providers: tuple[ProviderRecord, ...]
) -> Mapping[tuple[str, str], Option]:
    version = _version_of(subject)
    known = {(SESSION, option.name): option for option in known_attributes(version)}
    known |= {(SESSION, option.name): option for option in known_session_config(version)}
    for provider in providers:
        options = known_provider_options(provider.name, version)
        known |= {(provider.name, option.name): option for option in options}
    return known


def _version_of(subject: ReportSubject) -> str:
    version = str(subject.manifest.environment.get("onnxruntime", NEWEST))
    try:
        version_parts(version)
    except SpecError:
        return NEWEST
    return version


def _options_table(chosen: tuple[_Chosen, ...], known: Mapping[tuple[str, str], Option]) -> ReportTable:
    columns = ("where", "~option", "value", "~ONNX Runtime’s own", "~effect")
    rows = []
    for one in chosen:
        option = known.get((one.place, one.name))
        cells = (
            one.place,
            one.name or "execution provider",
            one.value or "used",
            option.default if option else "",
            option.effect if option else "",
        )
        rows.append(cells)
    return make_table("What a session is made with", columns, rows)
