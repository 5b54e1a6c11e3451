"""The search space of a model, a target and an ONNX Runtime; knobs without effect are left out. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ortprep.errors import TuningError
from ortprep.options import NEWEST, known_provider_options, known_session_config
from ortprep.tuning.space import CUDA, Knob, PlanChoice, Rule, Setting, Space

FORM, LEVEL, PREPACKING = "form", "level", "prepacking"
THREADS, SPINNING, EXECUTION = "threads", "spinning", "execution"
IO_BINDING = "io_binding"

MAPPED, INLINE, PREPACKED, ORT = "mapped", "inline", "prepacked", "ort"
"""Forms: external data that is mapped; weights in the model file; external data with the arranged copies of
prepacking beside it; ONNX Runtime's own format, mapped."""

ON, OFF = "on", "off"

SOURCE = "source"
"""The level of a model that is shipped as it is: it has no other form."""

MAX_INLINE_BYTES = 1_900_000_000
"""Weights above this size are not written into one file: protobuf and flatbuffers end at 2 GiB."""

_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "QLinearConv", "ConvInteger"})
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True)
class ModelFeatures:
    """Features of a prepared graph that decide which knobs matter.

    Attributes:
        operators: Operator types without domain, subgraphs included.
        width: Maximum number of nodes with real work that could run at the same time.
        layout_bound: Whether full optimisation wrote nodes laid out for this processor.
    """

    operators: tuple[str, ...]
    initializer_bytes: int
    width: int
    layout_bound: bool
    has_1d_convolutions: bool
    fixed_shapes: bool

    @property
    def has_convolutions(self) -> bool:
        """Whether there is a convolution."""
        return not _CONVOLUTIONS.isdisjoint(self.operators)

    @property
    def has_control_flow(self) -> bool:
        """Whether a node holds a subgraph."""
        return not _CONTROL_FLOW.isdisjoint(self.operators)


@dataclass(frozen=True)
class Conditions:
    """Machine and settings of a search.

    Attributes:
        cores: Processors the session may use.
        levels: Ladder steps a graph can be written at, best first; the first one is verified.
        allowed: Searches the user opted in to: `tf32`, `cudnn_default`, `io_binding`.
        fixed: Options the user has set, with their values; these are not searched.
    """

    target: str
    onnxruntime: str
    cores: int
    levels: tuple[str, ...]
    allowed: Collection[str] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_helpers(self) -> bool:
        """Whether several threads can work on one operator."""
        return self.cores > 1 and self.fixed.get("intra_op_num_threads") != "1"


def build_space(features: ModelFeatures, conditions: Conditions) -> Space:
    """Returns every plan that could be better than another."""
    builder = _on_cuda if conditions.target == "cuda" else _on_cpu
    known = _known_options(conditions)
    knobs = (
        without
        for knob in builder(features, conditions)
        if (without := _without_unknown(knob, known, conditions.fixed)) is not None
    )
    return Space(tuple(knob for knob in knobs if len(knob.settings) > 1 or knob.shapes_file), _RULES)


_RULES = (
    # A file's arranged copies are not looked at without prepacking: it is then the plain mapped file.
    Rule({FORM: PREPACKED, PREPACKING: OFF}, (FORM, MAPPED)),
    # One thread prepacks alone, and has nobody to wait for.
    Rule({THREADS: "1", PREPACKING: "parallel"}, (PREPACKING, ON)),
    Rule({THREADS: "1"}, (SPINNING, ON)),
    # Memory patterns need a fixed order of operators.
    Rule({EXECUTION: "parallel"}, ("memory_pattern", ON)),
    Rule({EXECUTION: "parallel-2"}, ("memory_pattern", ON)),
    # A recorded run is replayed on the addresses it was recorded on, so they must stay.
    Rule({"cuda_graph": ON}, (IO_BINDING, ON)),
    Rule({IO_BINDING: OFF}, ("cuda_graph", OFF)),
    Rule({"cudnn": OFF}, ("convolution_search", "exhaustive")),
)


def _on_cpu(features: ModelFeatures, conditions: Conditions) -> Iterator[Knob]:
    others = (
        [] if conditions.levels == (SOURCE,) else [*_inline_forms(features), *_prepacked_form(conditions)]
    )
    yield Knob(FORM, (Setting(MAPPED), *others), "How weights are stored.", shapes_file=True)
    yield Knob(
        PREPACKING,
        (
            Setting(ON),
            Setting(OFF, config_entries={"session.disable_prepacking": "1"}),
            *_parallel_prepacking(conditions),
        ),
        "Whether weights are rearranged for this processor's kernels at every load.",
    )
    yield _level(conditions)
    yield Knob(THREADS, tuple(_thread_counts(conditions)), "Threads that share the work of one operator.")
    if conditions.has_helpers:
        yield _switch(SPINNING, "session.intra_op.allow_spinning", "Whether idle threads spin.", first=ON)
    if features.width > 1 and conditions.cores > 1:
        branches = tuple(_parallel_branches(min(features.width, conditions.cores)))
        yield Knob(EXECUTION, (Setting("sequential"), *branches), "Whether branches run at the same time.")
    yield _attribute("memory_arena", "enable_cpu_mem_arena", "Whether freed memory is kept for later runs.")
    if features.fixed_shapes:
        yield _attribute(
            "memory_pattern", "enable_mem_pattern", "Whether a run's tensors are planned as one block."
        )
    yield _device_allocator()


def _inline_forms(features: ModelFeatures) -> Iterator[Setting]:
    if features.initializer_bytes > MAX_INLINE_BYTES:
        return
    yield Setting(INLINE)
    entries = {
        "session.use_memory_mapped_ort_model": "1",
        "session.use_ort_model_bytes_for_initializers": "1",
    }
    yield Setting(ORT, config_entries=entries)


def _prepacked_form(conditions: Conditions) -> Iterator[Setting]:
    if conditions.fixed.get("session.disable_prepacking") != "1":
        yield Setting(PREPACKED)


def _level(conditions: Conditions) -> Knob:
    settings = tuple(Setting(level) for level in conditions.levels)
    return Knob(LEVEL, settings, "How far the graph was optimised before it was written.", shapes_file=True)


def _parallel_prepacking(conditions: Conditions) -> Iterator[Setting]:
    if conditions.has_helpers:
        yield Setting("parallel", config_entries={"session.prepack.enable_parallel": "1"})


def _thread_counts(conditions: Conditions) -> Iterator[Setting]:
    """ONNX Runtime's default (all physical cores), half and a quarter of the processors, and one."""
    yield Setting("all")
    for count in dict.fromkeys((conditions.cores // 2, conditions.cores // 4, 1)):
        if 1 <= count < conditions.cores:
            yield Setting(str(count), attributes={"intra_op_num_threads": count})


def _parallel_branches(most: int) -> Iterator[Setting]:
    """As many branches at a time as there can be; two, which is often enough."""
    for name, threads in (("parallel", most), ("parallel-2", 2)):
        if name == "parallel" or most > threads:
            yield Setting(
                name, attributes={"execution_mode": "ORT_PARALLEL", "inter_op_num_threads": threads}
            )


def _device_allocator() -> Knob:
    return _switch(
        "device_allocator",
        "session.use_device_allocator_for_initializers",
        "Whether weights are allocated outside the arena, which then does not grow around them.",
        first=OFF,
    )


def _switch(name: str, entry: str, effect: str, *, first: str) -> Knob:
    values = {ON: "1", OFF: "0"}
    second = OFF if first == ON else ON
    return Knob(name, (Setting(first), Setting(second, config_entries={entry: values[second]})), effect)


def _attribute(name: str, attribute: str, effect: str) -> Knob:
    return Knob(name, (Setting(ON), Setting(OFF, attributes={attribute: False})), effect)


def _on_cuda(features: ModelFeatures, conditions: Conditions) -> Iterator[Knob]:
    is_small = features.initializer_bytes <= MAX_INLINE_BYTES and conditions.levels != (SOURCE,)
    others = [Setting(INLINE)] if is_small else []
    yield Knob(FORM, (Setting(MAPPED), *others), "How weights are stored.", shapes_file=True)
    yield _level(conditions)
    yield Knob(
        PREPACKING,
        (Setting(ON), Setting(OFF, config_entries={"session.disable_prepacking": "1"})),
        "Whether weights are rearranged for the kernels at every load.",
    )
    yield _device_allocator()
    yield from _convolution_knobs(features, conditions)
    yield _cuda(
        "arena_growth", "arena_extend_strategy", "How the arena grows.", power="", same="kSameAsRequested"
    )
    yield _cuda(
        "reading_threads",
        "external_data_loader_reading_threads",
        "Threads that read weights.",
        four="",
        none="0",
        eight="8",
    )
    yield _cuda(
        "unified_stream", "use_ep_level_unified_stream", "Whether all work is on one stream.", off="", on="1"
    )
    if not features.has_convolutions:
        yield _cuda("cudnn", "enable_cudnn", "Whether cuDNN is loaded.", on="", off="0")
    if "tf32" in conditions.allowed:
        yield _cuda("tf32", "use_tf32", "Whether float32 is multiplied in TF32.", on="", off="0")
    if IO_BINDING in conditions.allowed:
        yield Knob(IO_BINDING, (Setting(OFF), Setting(ON)), "Whether jobs bind inputs and outputs.")
        if features.fixed_shapes and not features.has_control_flow:
            yield _cuda(
                "cuda_graph", "enable_cuda_graph", "Whether a run is recorded and replayed.", off="", on="1"
            )


def _convolution_knobs(features: ModelFeatures, conditions: Conditions) -> Iterator[Knob]:
    if not features.has_convolutions:
        return
    slow = {"default": "DEFAULT"} if "cudnn_default" in conditions.allowed else {}
    yield _cuda(
        "convolution_search",
        "cudnn_conv_algo_search",
        "How a convolution's plan is found in the first run of a shape.",
        exhaustive="",
        heuristic="HEURISTIC",
        **slow,
    )
    yield _cuda("workspace", "cudnn_conv_use_max_workspace", "Memory that plans may use.", most="", least="0")
    yield _cuda("channels_last", "prefer_nhwc", "Whether convolutions run channels-last.", off="", on="1")
    yield _cuda(
        "bias_fusion", "fuse_conv_bias", "Whether convolution and bias are one kernel.", off="", on="1"
    )
    if features.has_1d_convolutions:
        yield _cuda("pad_1d", "cudnn_conv1d_pad_to_nc1d", "How 1-D convolutions are padded.", off="", on="1")


def _cuda(name: str, option: str, effect: str, **values: str) -> Knob:
    """Returns a knob of one provider option; an empty text leaves the option as it is."""
    settings = tuple(
        Setting(value, provider_options={option: text} if text else {}) for value, text in values.items()
    )
    return Knob(name, settings, effect)


def _known_options(conditions: Conditions) -> frozenset[str]:
    version = conditions.onnxruntime
    known = (*known_session_config(version), *known_provider_options(CUDA, version))
    return frozenset(option.name for option in known)


def _without_unknown(knob: Knob, known: Collection[str], fixed: Collection[str]) -> Knob | None:
    """Returns the knob without values that this ONNX Runtime lacks, None if the user has decided it.

    A knob of files only loses the values that contradict the user: every plan has a form.
    """
    settings = []
    for setting in knob.settings:
        is_fixed = bool(
            {*setting.attributes, *setting.config_entries, *setting.provider_options} & set(fixed)
        )
        if is_fixed and not knob.shapes_file:
            return None
        if not is_fixed and {*setting.config_entries, *setting.provider_options} <= set(known):
            settings.append(setting)
    return replace(knob, settings=tuple(settings))


def needs_binding(choice: PlanChoice) -> bool:
    """Says whether a plan is run with inputs and outputs bound."""
    return choice.as_dict().get(IO_BINDING) == ON


def shares_files(first: PlanChoice, second: PlanChoice) -> bool:
    """Says whether the first plan can be loaded from the files of the second."""
    own, other = first.as_dict(), second.as_dict()
    if own.get(LEVEL) != other.get(LEVEL):
        return False
    # Without prepacking a file's arranged copies are not looked at.
    unpacked = own.get(FORM) == MAPPED and own.get(PREPACKING) == OFF
    return own.get(FORM) == other.get(FORM) or (unpacked and other.get(FORM) == PREPACKED)


def restrict(space: Space, wanted: Mapping[str, tuple[str, ...]]) -> Space:
    """Returns the space with only those values of some knobs; the first value becomes the base.

    A knob that does not exist here is ignored: a spec is for several targets and versions.

    Raises:
        TuningError: None of a knob's values exists here.
    """
    knobs = []
    for knob in space.knobs:
        values = wanted.get(knob.name)
        if values is None:
            knobs.append(knob)
            continue
        settings = tuple(found for value in values if (found := _find_setting(knob, value)) is not None)
        if not settings:
            raise TuningError(
                f"no value of {knob.name} is left to search\n"
                f"  expected one of {', '.join(knob.values)}, got {', '.join(values)}"
            )
        knobs.append(replace(knob, settings=settings))
    return replace(space, knobs=tuple(knobs))


def _find_setting(knob: Knob, value: str) -> Setting | None:
    if knob.name == THREADS and _COUNT.fullmatch(value):
        return Setting(value, attributes={"intra_op_num_threads": int(value)})
    return next((setting for setting in knob.settings if setting.name == value), None)


def find_space_problems(wanted: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the problems of a user's restriction of the space, on any target."""
    knobs = {knob.name: knob for target in ("cpu", "cuda") for knob in _everything(target).knobs}
    values = {name: dict.fromkeys(knob.values) for name, knob in knobs.items()}
    for knob in _everything("cpu").knobs:
        values[knob.name] |= dict.fromkeys(knob.values)
    problems = []
    for name, chosen in wanted.items():
        if name not in values:
            problems.append(f"unknown knob {name!r}; expected one of {', '.join(values)}")
            continue
        unknown = [v for v in chosen if v not in values[name] and _find_setting(knobs[name], v) is None]
        if unknown:
            expected = "all or a number" if name == THREADS else f"one of {', '.join(values[name])}"
            problems.append(f"unknown value {unknown[0]!r} of knob {name!r}; expected {expected}")
    return tuple(problems)


def _everything(target: str) -> Space:
    """Returns the largest space there is on a target."""
    features = ModelFeatures(("Conv",), 0, 64, layout_bound=True, has_1d_convolutions=True, fixed_shapes=True)
    without = ModelFeatures(
        ("MatMul",), 0, 64, layout_bound=True, has_1d_convolutions=False, fixed_shapes=True
    )
    levels = ("all", "all-reduced", "extended", "basic", SOURCE)
    conditions = Conditions(target, NEWEST, 64, levels, allowed=("tf32", "cudnn_default", IO_BINDING))
    spaces = [build_space(one, conditions) for one in (features, without)]
    return Space(tuple({knob.name: knob for space in spaces for knob in space.knobs}.values()))
