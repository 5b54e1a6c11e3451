"""Which of a variant's options Triton's ONNX Runtime backend takes, and where: a function of values.

The backend reads a fixed set of keys of `parameters`, a graph level, and any option of the CUDA provider as a
parameter of the accelerator `cuda`, which it passes to ONNX Runtime unchanged. Whenever the configuration has
`parameters`, and the server always has them, four options of CUDA are set from there, or else to their
defaults, after the accelerator's: those go to `parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ortprep.bundle.loader_config import Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.export.option_mapping import (
    LEVEL,
    MappedOptions,
    RecordedOption,
    UnmappedOption,
    recorded_options,
)
from ortprep.options import OLDEST, format_option, known_provider_options, version_parts
from ortprep.options.option import NEWEST, Option
from ortprep.runtime.loading.session import CPU, CUDA

LEVELS = {"ORT_DISABLE_ALL": 2, "ORT_ENABLE_BASIC": -1, "ORT_ENABLE_EXTENDED": 1, "ORT_ENABLE_ALL": 0}
"""`optimization.graph.level` by ONNX Runtime's level; 2 since Triton 24.01, which is the lowest there is."""

_PARAMETERS = {
    "intra_op_num_threads": "intra_op_thread_count",
    "inter_op_num_threads": "inter_op_thread_count",
    "execution_mode": "execution_mode",
    "enable_cpu_mem_arena": "enable_mem_arena",
    "enable_mem_pattern": "enable_mem_pattern",
}
_ENTRIES = frozenset({"session.use_device_allocator_for_initializers"})
_CODES = {
    "execution_mode": {"ORT_SEQUENTIAL": "0", "ORT_PARALLEL": "1"},
    "cudnn_conv_algo_search": {"EXHAUSTIVE": "0", "HEURISTIC": "1", "DEFAULT": "2"},
    "arena_extend_strategy": {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"},
}
_CUDA_PARAMETERS = frozenset(
    {"cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream"}
)
_BACKENDS_OWN = frozenset({"has_user_compute_stream", "user_compute_stream"})


@dataclass(frozen=True)
class ConfigEntry:
    """Where an option goes.

    Attributes:
        section: `level`, `parameters`, `cuda` (the accelerator) or `gpus`.
        key: Its name there.
        value: Its value there.
    """

    section: str
    key: str
    value: str

    def __str__(self) -> str:
        field = {"level": "optimization.graph.level", "gpus": "instance_group.gpus"}.get(self.section)
        return f"{field}={self.value}" if field else f"{self.section}.{self.key}={self.value}"


@dataclass(frozen=True)
class TritonSettings:
    """What a model configuration says of a session.

    Attributes:
        level: `optimization.graph.level`.
        parameters: The model's `parameters`.
        cuda: Parameters of the accelerator `cuda`.
        gpus: GPUs by ordinal; empty for all.
        on_gpu: Whether instances are of KIND_GPU.
        carried: Options that are there.
        left_out: What is not.
        session_options: What the backend makes of it.
        providers: Providers that the backend makes of it.
    """

    level: int
    parameters: Mapping[str, str]
    cuda: Mapping[str, str]
    gpus: tuple[int, ...]
    on_gpu: bool
    carried: tuple[MappedOptions, ...]
    left_out: tuple[UnmappedOption, ...]
    session_options: SessionOptionsRecord = field(repr=False)
    providers: tuple[ProviderRecord, ...] = field(repr=False)


def plan_settings(variant: Variant, *, onnxruntime: str | None = None) -> TritonSettings:
    """Returns what Triton's configuration says of a variant's options, and what it cannot say.

    Without the server's version of ONNX Runtime, only options pass that every version has.

    Raises:
        ExportError: The variant runs on a provider that is neither CPU nor CUDA.
    """
    names = [provider.name for provider in variant.providers]
    if not names or names[0] not in (CPU, CUDA) or set(names) - {CPU, CUDA}:
        raise ExportError(
            f"cannot export variant {variant.name!r} for Triton\n"
            f"  expected the execution providers {CUDA} and {CPU}, got {', '.join(names)}"
        )
    found = [(one, _find_place(one, onnxruntime)) for one in recorded_options(variant)]
    placed = [(one, place) for one, place in found if isinstance(place, ConfigEntry)]
    left_out = [UnmappedOption(str(one), reason) for one, reason in found if isinstance(reason, str)]
    level = variant.session_options.graph_optimization_level
    if level not in LEVELS:
        level = "ORT_ENABLE_ALL"
    return TritonSettings(
        level=LEVELS[level],
        parameters=_section(placed, "parameters"),
        cuda=_section(placed, "cuda"),
        gpus=tuple(int(place.value) for _, place in placed if place.section == "gpus"),
        on_gpu=names[0] == CUDA,
        carried=tuple(MappedOptions(one, str(place)) for one, place in placed),
        left_out=(*left_out, *_other_facts(variant)),
        session_options=_kept_session_options(placed, level),
        providers=_kept_providers(variant, placed),
    )


def _section(placed: Iterable[tuple[RecordedOption, ConfigEntry]], section: str) -> dict[str, str]:
    return {place.key: place.value for _, place in placed if place.section == section}


def _find_place(option: RecordedOption, version: str | None) -> ConfigEntry | str:
    """Returns where an option goes, or why it goes nowhere."""
    match option.kind:
        case "session option":
            return _place_attribute(option)
        case "session entry" if option.name in _ENTRIES:
            return ConfigEntry("parameters", option.name, str(option.value))
        case "session entry":
            return "the backend passes on no session entry but " + ", ".join(_ENTRIES)
        case kind if kind == CUDA:
            return _place_cuda_option(option, version)
    return "the backend gives this provider no options"


def _place_attribute(option: RecordedOption) -> ConfigEntry | str:
    if option.name == LEVEL:
        level = LEVELS.get(str(option.value))
        if level is None:
            return "the backend has no such level; the session runs every optimisation"
        return ConfigEntry("level", LEVEL, str(level))
    key = _PARAMETERS.get(option.name)
    if key is None:
        return "the backend reads no parameter for it; ONNX Runtime's default holds"
    text = _translate(option)
    return ConfigEntry("parameters", key, text) if text is not None else "the backend knows no such value"


def _place_cuda_option(option: RecordedOption, version: str | None) -> ConfigEntry | str:
    value = str(option.value)
    if option.name == "device_id":
        return ConfigEntry("gpus", option.name, value) if value.isdecimal() else "no GPU has such a number"
    if option.name in _BACKENDS_OWN:
        return "the backend sets it itself, to the stream of the instance"
    if option.name == "enable_cuda_graph" and value == "1":
        return (
            "the backend binds other memory at every request, and a recorded graph would go on reading the "
            "old; kernels are launched one by one"
        )
    text = _translate(option)
    if text is None or not text:
        return "the backend knows no such value"
    if option.name in _CUDA_PARAMETERS:
        return ConfigEntry("parameters", option.name, text)
    return _version_reason(option, version) or ConfigEntry("cuda", option.name, text)


def _version_reason(option: RecordedOption, version: str | None) -> str | None:
    """Returns why a server may not know a CUDA option; an unknown one keeps the model from loading."""
    known: Mapping[str, Option] = {one.name: one for one in known_provider_options(CUDA, NEWEST)}
    found = known.get(option.name)
    if found is None:
        return (
            "ortprep does not know which ONNX Runtime introduced it, and older ones would refuse to load it"
        )
    if found.exists_in(version or OLDEST):
        return None
    since = f"ONNX Runtime has had it since {found.since}"
    if version is None:
        return f"{since}, and what the server has is not known (--onnxruntime)"
    return f"{since}, the server has {'.'.join(map(str, version_parts(version)))}"


def _translate(option: RecordedOption) -> str | None:
    """Returns a value as the backend spells it, None if it knows none such."""
    codes = _CODES.get(option.name)
    return format_option(option.value) if codes is None else codes.get(str(option.value))


def _other_facts(variant: Variant) -> Iterable[UnmappedOption]:
    if variant.first_phase is not None:
        yield UnmappedOption(
            "first phase", "the backend makes one session per instance, with the options for steady runs"
        )
    if variant.io_binding:
        yield UnmappedOption("io_binding", "the backend binds each request's own memory")


def _kept_session_options(
    placed: Iterable[tuple[RecordedOption, ConfigEntry]], level: str
) -> SessionOptionsRecord:
    options = [option for option, _ in placed if option.name != LEVEL]
    attributes = {option.name: option.value for option in options if option.kind == "session option"}
    entries = {option.name: str(option.value) for option in options if option.kind == "session entry"}
    return SessionOptionsRecord(level, attributes, entries)


def _kept_providers(
    variant: Variant, placed: Iterable[tuple[RecordedOption, ConfigEntry]]
) -> tuple[ProviderRecord, ...]:
    names = {(one.kind, one.name) for one, _ in placed}
    return tuple(
        ProviderRecord(
            provider.name,
            {name: text for name, text in provider.options.items() if (provider.name, name) in names},
        )
        for provider in variant.providers
    )
