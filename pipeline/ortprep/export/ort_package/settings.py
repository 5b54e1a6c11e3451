"""A variant's options as a model package has them: a function of values.

Entries of `session_options` go through `AddSessionConfigEntry` of the C interface. Since ONNX Runtime 1.28
it also takes the plain options of a session, under names and values of their own. Tried on 1.31.1: a bad
value is refused when the session is made, an entry that it does not know does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortprep.bundle.loader_config import Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.export.option_mapping import (
    LEVEL,
    MappedOptions,
    RecordedOption,
    UnmappedOption,
    recorded_options,
)
from ortprep.options import NEWEST, format_option, known_attributes, known_session_config

FORBIDDEN = frozenset(
    {
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.enable_profiling",
        "session.optimized_model_filepath",
    }
)
"""Entries that make a session write files: a package with one does not open."""

PATHS = frozenset({"session.model_external_initializers_file_folder_path", "ep.context_file_path"})
"""Entries whose value is a path, which is resolved in the package."""

_OTHER_NAMES = {"logid": "log_id"}


@dataclass(frozen=True)
class PackageSettings:
    """What `executor_info["ort"]` says of a session."""

    session_options: Mapping[str, str]
    provider_options: Mapping[str, str]
    carried: tuple[MappedOptions, ...]
    left_out: tuple[UnmappedOption, ...]
    plan_options: SessionOptionsRecord
    plan_providers: tuple[ProviderRecord, ...]


def plan_settings(variant: Variant) -> PackageSettings:
    """Returns what a model package says of a variant's options, and what it cannot say."""
    taken, left_out = [], []
    for option in recorded_options(variant):
        key, reason = _find_key(option, variant)
        if key is None:
            left_out.append(UnmappedOption(str(option), reason))
        else:
            taken.append((option, key, _spell(option)))
    preferred = variant.providers[0].name
    entries = {key: text for option, key, text in taken if option.kind != preferred}
    provider = {key: text for option, key, text in taken if option.kind == preferred}
    return PackageSettings(
        session_options=entries,
        provider_options=provider,
        carried=tuple(
            MappedOptions(one, f"{'provider' if one.kind == preferred else 'session'}_options.{key}={text}")
            for one, key, text in taken
        ),
        left_out=(*left_out, *_other_facts(variant)),
        plan_options=_kept_options(variant, [option for option, _, _ in taken]),
        plan_providers=(ProviderRecord(preferred, provider), *map(_bare, variant.providers[1:])),
    )


def _find_key(option: RecordedOption, variant: Variant) -> tuple[str | None, str]:
    """Returns an option's name in a package, or None and why it has none."""
    if option.kind == "session option":
        key = _attribute_key(option.name)
        if key not in {one.name for one in known_session_config(NEWEST)} - FORBIDDEN:
            return None, "a package has no entry for it; ONNX Runtime's default holds"
        return key, ""
    if option.kind == "session entry":
        if option.name in {_attribute_key(one.name) for one in known_attributes(NEWEST)}:
            return None, "Python, used to prepare the variant, ignores it; a package would not"
        refused = option.name in FORBIDDEN | PATHS
        return (None, "not allowed in a package") if refused else (option.name, "")
    if option.kind != variant.providers[0].name:
        return None, "a package has options of one provider, the preferred one"
    return option.name, ""


def _attribute_key(name: str) -> str:
    return f"session.{_OTHER_NAMES.get(name, name)}"


def _spell(option: RecordedOption) -> str:
    if option.name == LEVEL:
        return str(option.value).removeprefix("ORT_").lower()
    if option.kind == "session option" and option.name == "execution_mode":
        return str(option.value).removeprefix("ORT_").lower()
    return format_option(option.value)


def _other_facts(variant: Variant) -> Iterator[UnmappedOption]:
    if variant.first_phase is not None:
        yield UnmappedOption("first phase", "a package describes only one session, the one for steady runs")


def _kept_options(variant: Variant, taken: list[RecordedOption]) -> SessionOptionsRecord:
    recorded = variant.session_options
    names = {(one.kind, one.name) for one in taken}
    return SessionOptionsRecord(
        recorded.graph_optimization_level,
        {name: one for name, one in recorded.attributes.items() if ("session option", name) in names},
        {key: one for key, one in recorded.config_entries.items() if ("session entry", key) in names},
    )


def _bare(provider: ProviderRecord) -> ProviderRecord:
    return ProviderRecord(provider.name)
