"""Options of a variant that Triton's ONNX Runtime backend takes, and their places in `config.pbtxt`. Pure.

The backend reads a fixed set of keys of `parameters`, a graph level, and any option of the CUDA provider as a
parameter of the accelerator `cuda`, which it passes to ONNX Runtime unchanged. Whenever the configuration has
`parameters`, and the server always has them, four options of CUDA are set from there, or else to their
defaults, after the accelerator's: those go to `parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ortprep.bundle.loader_config import Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.options import format_option, known_options
from ortprep.options.option import NEWEST
from ortprep.runtime.loading.session import CPU, CUDA

ATTRIBUTE = "session option"
ENTRY = "session entry"
LEVEL = "graph_optimization_level"

_DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"

GRAPH, PARAMETERS, ACCELERATOR, GPUS = "optimization.graph", "parameters", "cuda", "instance_group"
"""Sections of a model configuration that have options of a session."""

LEVELS = {"ORT_DISABLE_ALL": "2", "ORT_ENABLE_BASIC": "-1", "ORT_ENABLE_EXTENDED": "1", "ORT_ENABLE_ALL": "0"}
"""`optimization.graph.level` by ONNX Runtime's level; 2 since Triton 24.01, which is the lowest there is."""

_PARAMETERS = {
    (ATTRIBUTE, "intra_op_num_threads"): "intra_op_thread_count",
    (ATTRIBUTE, "inter_op_num_threads"): "inter_op_thread_count",
    (ATTRIBUTE, "execution_mode"): "execution_mode",
    (ATTRIBUTE, "enable_cpu_mem_arena"): "enable_mem_arena",
    (ATTRIBUTE, "enable_mem_pattern"): "enable_mem_pattern",
    (ENTRY, _DEVICE_ALLOCATOR): _DEVICE_ALLOCATOR,
    (CUDA, "cudnn_conv_algo_search"): "cudnn_conv_algo_search",
    (CUDA, "arena_extend_strategy"): "arena_extend_strategy",
    (CUDA, "gpu_mem_limit"): "gpu_mem_limit",
    (CUDA, "do_copy_in_default_stream"): "do_copy_in_default_stream",
}
"""Keys of `parameters` by kind and name of an option."""

_SPELLINGS = {
    "execution_mode": {"ORT_SEQUENTIAL": "0", "ORT_PARALLEL": "1"},
    "cudnn_conv_algo_search": {"EXHAUSTIVE": "0", "HEURISTIC": "1", "DEFAULT": "2"},
    "arena_extend_strategy": {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"},
}
"""The backend's spelling of values, where it is not ONNX Runtime's."""

_SET_BY_BACKEND = frozenset({"has_user_compute_stream", "user_compute_stream"})


class RecordedOption(NamedTuple):
    """An option that a variant's session is made with.

    Attributes:
        kind: `session option`, `session entry`, or the name of an execution provider.
        name: ONNX Runtime's name of it.
        value: The recorded value.
    """

    kind: str
    name: str
    value: str | int | bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}={self.value}"


class Place(NamedTuple):
    """Key and value of an option in one of the sections of a model configuration."""

    section: str
    key: str
    value: str


@dataclass(frozen=True)
class MappedOptions:
    """A variant's options in a model configuration.

    Attributes:
        places: Places of the options that the configuration has.
        left_out: Options and other properties that it does not have.
        session_options: The session options that remain.
        providers: The execution providers, with the options that remain.
    """

    places: Mapping[RecordedOption, Place]
    left_out: tuple[str, ...]
    session_options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]

    def section(self, name: str) -> Mapping[str, str]:
        """Returns the keys and values of a section, none if nothing is there."""
        return {place.key: place.value for place in self.places.values() if place.section == name}


def recorded_options(variant: Variant) -> Iterator[RecordedOption]:
    """Yields every option of a variant's session: level, attributes, entries, and those of its providers."""
    options = variant.session_options
    yield RecordedOption(ATTRIBUTE, LEVEL, options.graph_optimization_level)
    for name, value in options.attributes.items():
        yield RecordedOption(ATTRIBUTE, name, value)
    for key, entry in options.config_entries.items():
        yield RecordedOption(ENTRY, key, entry)
    for provider in variant.providers:
        for name, text in provider.options.items():
            yield RecordedOption(provider.name, name, text)


def plan_options(variant: Variant) -> MappedOptions:
    """Returns a variant's options as sections of a model configuration, and what it cannot have.

    Options pass that every version of ONNX Runtime has which the variant may be loaded with.

    Raises:
        ExportError: The variant runs on a provider that is neither CPU nor CUDA.
    """
    names = [provider.name for provider in variant.providers]
    if not names or names[0] not in (CPU, CUDA) or set(names) - {CPU, CUDA}:
        raise ExportError(
            f"cannot export variant {variant.name!r} for Triton\n"
            f"  expected the execution providers {CUDA} and {CPU}, got {', '.join(names)}"
        )
    places: dict[RecordedOption, Place] = {}
    left_out: list[str] = []
    for option in recorded_options(variant):
        place = _find_place(option, variant.requirements.onnxruntime.minimum)
        if place is None:
            left_out.append(str(option))
        else:
            places[option] = place
    if variant.first_phase is not None:
        left_out.append("first phase")
    attributes = {one.name: one.value for one in places if one.kind == ATTRIBUTE}
    level = str(attributes.pop(LEVEL, "ORT_ENABLE_ALL"))
    session_options = SessionOptionsRecord(level, attributes, _texts_of(places, ENTRY))
    providers = tuple(ProviderRecord(one.name, _texts_of(places, one.name)) for one in variant.providers)
    return MappedOptions(places, tuple(left_out), session_options, providers)


def _texts_of(options: Iterable[RecordedOption], kind: str) -> dict[str, str]:
    return {one.name: str(one.value) for one in options if one.kind == kind}


def _find_place(option: RecordedOption, version: str) -> Place | None:
    """Returns the place of an option in a model configuration, None if the backend does not take it.

    An option of CUDA that `version` lacks, or that may be newer, would keep the model from loading.
    """
    kind, name, value = option
    if name == LEVEL:
        level = LEVELS.get(str(value))
        return Place(GRAPH, "level", level) if level else None
    if name == "device_id":
        return Place(GPUS, "gpus", str(value)) if kind == CUDA and str(value).isdecimal() else None
    spelling = _SPELLINGS.get(name)
    text = format_option(value) if spelling is None else spelling.get(str(value))
    key = _PARAMETERS.get((kind, name))
    if not text or name in _SET_BY_BACKEND:
        return None
    if key is not None:
        return Place(PARAMETERS, key, text)
    known = {one.name: one for one in known_options(CUDA, NEWEST)} if kind == CUDA else {}
    return Place(ACCELERATOR, name, text) if name in known and known[name].exists_in(version) else None
